"""The Kubernetes manifests as a cluster would get them, and what a pod made from them is given."""

import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it has no types
from tests.deploy.fresh import ROOT

from tiergate.config import values

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.parent.name for path in KUBERNETES.glob("overlays/*/kustomization.yaml"))
KUSTOMIZE = next(
    (command for command in (["kustomize", "build"], ["kubectl", "kustomize"]) if shutil.which(command[0])), []
)

needs_kustomize = pytest.mark.skipif(not KUSTOMIZE, reason="there is neither kustomize nor kubectl on PATH")
"""Skips tests of overlays where nothing can put them together."""

Manifest = dict[str, Any]


def documents(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]


@cache
def rendered(overlay: str) -> "Manifests":
    """What `kubectl apply -k` would apply."""
    done = subprocess.run(
        [*KUSTOMIZE, str(KUBERNETES / "overlays" / overlay)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return Manifests(tuple(documents(done.stdout)))


@dataclass(frozen=True)
class Manifests:
    """All that an overlay applies."""

    all: tuple[Manifest, ...]

    def of(self, kind: str) -> list[Manifest]:
        return [each for each in self.all if each["kind"] == kind]

    def one(self, kind: str, name: str = "") -> Manifest:
        (found,) = (each for each in self.of(kind) if name in ("", each["metadata"]["name"]))
        return found

    @property
    def nodes(self) -> "Workload":
        """The DaemonSet."""
        return Workload(self.one("DaemonSet"))

    @property
    def workloads(self) -> list["Workload"]:
        return [Workload(each) for kind in ("DaemonSet", "StatefulSet") for each in self.of(kind)]

    @property
    def settings(self) -> dict[str, str]:
        """What is the same for all nodes."""
        data: dict[str, str] = self.one("ConfigMap")["data"]
        return data


@dataclass(frozen=True)
class Workload:
    """A DaemonSet or a StatefulSet of pods with one container."""

    manifest: Manifest

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def pod(self) -> Manifest:
        spec: Manifest = self.manifest["spec"]["template"]["spec"]
        return spec

    @property
    def labels(self) -> Mapping[str, str]:
        labels: Mapping[str, str] = self.manifest["spec"]["template"]["metadata"]["labels"]
        return labels

    @property
    def container(self) -> Manifest:
        (container,) = self.pod["containers"]
        return dict(container)

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def volumes(self) -> dict[str, Manifest]:
        return {volume["name"]: volume for volume in self.pod["volumes"]}

    def mounted(self, path: str) -> Manifest:
        """The volume in which a path of the container lies."""
        mounts = {mount["mountPath"]: mount["name"] for mount in self.container["volumeMounts"]}
        return self.volumes[
            next(mounts[str(place)] for place in [Path(path), *Path(path).parents] if str(place) in mounts)
        ]

    def variables(self, settings: Mapping[str, str], pod: Mapping[str, str], secret: str) -> dict[str, str]:
        """The environment of its container: `pod` is what its fields are, and every secret is `secret`."""
        given = dict(settings) if "envFrom" in self.container else {}
        own: dict[str, str] = {}
        for variable in self.container["env"]:
            source = variable.get("valueFrom", {})
            if "fieldRef" in source:
                value = pod.get(source["fieldRef"]["fieldPath"], "")
            elif "secretKeyRef" in source:
                value = secret
            else:
                value = expanded(variable["value"], own)
            own[variable["name"]] = value
        return given | own


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """$(NAME) replaced, as the kubelet does; a name that was not defined before stays as it is."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)


def quantity_bytes(quantity: str) -> int:
    """A Kubernetes quantity of memory."""
    return values.parse_size(f"{quantity}B")


def selected(labels: Mapping[str, str], workloads: Iterable[Workload]) -> Iterator[Workload]:
    """The workloads whose pods a selector finds."""
    for each in workloads:
        if labels and labels.items() <= each.labels.items():
            yield each
