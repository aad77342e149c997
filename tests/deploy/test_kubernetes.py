"""deploy/kubernetes: every manifest is valid, and what must agree agrees."""

import random
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import kubernetes_validate  # type: ignore[import-untyped]  # it has no types
import pytest
from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
from tests.deploy.dockerfile import Image
from tests.deploy.fresh import ROOT, Served, local, served
from tests.deploy.manifests import (
    KUBERNETES,
    OVERLAYS,
    Manifest,
    Manifests,
    Workload,
    documents,
    needs_kustomize,
    quantity_bytes,
    rendered,
    selected,
)
from tests.deploy.members import NEWER_THAN_TESTED, running

from tiergate import config
from tiergate.clock import SystemClock
from tiergate.config import values
from tiergate.config.settings import DECLARATIONS
from tiergate.errors import DirectoryUnavailableError
from tiergate.etcd.channel import Tls
from tiergate.etcd.client import Access, EtcdClient
from tiergate.etcd.values import Range
from tiergate.testing.etcd import etcd_path, needs_etcd
from tiergate.testing.origins import MotoOrigin

FILES = sorted(KUBERNETES.rglob("*.yaml"))
PATCHES = {KUBERNETES / "overlays" / "existing-etcd" / "daemonset.yaml"}
README = (KUBERNETES / "README.md").read_text()
POD = {
    "spec.nodeName": "gpu-0001",
    "status.podIP": "10.1.2.3",
    "metadata.name": "tiergate-etcd-0",
    "metadata.labels['topology.kubernetes.io/zone']": "us-east-1a",
}
SECRET = "a-secret-of-this-test-that-is-long-enough"
OLDEST = "1.28"

overlay = pytest.mark.parametrize("manifests", OVERLAYS, indirect=True)


@pytest.fixture
def manifests(request: pytest.FixtureRequest) -> Manifests:
    return rendered(request.param)


def faults(manifest: Manifest) -> list[str]:
    """What the schemas of the oldest Kubernetes meant and of the newest known say against a manifest."""
    found: list[str] = []
    for version in (OLDEST, kubernetes_validate.latest_version()):
        try:
            kubernetes_validate.validate(manifest, version, strict=True)
        except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError) as error:
            found.append(f"{manifest.get('kind')} in {version}: {getattr(error, 'message', error)}")
    return found


def environment_of(manifests: Manifests, pod: Mapping[str, str], certificates: Path) -> dict[str, str]:
    """What a node's container is given; the files of its Secret are those in `certificates`."""
    mount = "/etc/tiergate/etcd"
    given = Image.read().environment | manifests.nodes.variables(manifests.settings, pod, SECRET)
    assert "secret" in manifests.nodes.mounted(mount)
    secret = certificates / manifests.nodes.mounted(mount)["secret"]["secretName"]
    return {name: value.replace(mount, str(secret)) for name, value in given.items()}


# -- valid
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(KUBERNETES)))
def test_a_file_holds_valid_manifests(path: Path) -> None:
    found = documents(path.read_text())
    assert found
    if path.name == "kustomization.yaml":
        named = [
            name
            for each in found
            for name in (*each["resources"], *(one.get("path", "") for one in each.get("patches", ())))
        ]
        assert [name for name in named if not (path.parent / name).exists()] == []
        beside = {other.name for other in path.parent.glob("*.yaml")} - {path.name}
        assert beside <= set(named), "a file that nothing applies"
    elif path not in PATCHES:
        assert [fault for each in found for fault in faults(each)] == []


def test_a_wrong_manifest_is_found() -> None:
    (service, _) = documents((KUBERNETES / "base" / "services.yaml").read_text())
    service["spec"]["internalTraficPolicy"] = service["spec"].pop("internalTrafficPolicy")
    assert faults(service) != []


@needs_kustomize
@overlay
def test_an_overlay_is_valid_as_a_whole(manifests: Manifests) -> None:
    assert [fault for each in manifests.all for fault in faults(each)] == []
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests.all]
    assert len(names) == len(set(names))
    spaces = {each["metadata"].get("namespace") for each in manifests.all if each["kind"] != "Namespace"}
    assert spaces == {manifests.one("Namespace")["metadata"]["name"]}


# -- the node's settings
@needs_kustomize
@overlay
def test_every_variable_is_a_setting(manifests: Manifests) -> None:
    known = {declaration.env for declaration in DECLARATIONS.values()}
    given = {
        name for name in manifests.nodes.variables(manifests.settings, POD, SECRET) if name.startswith("TIERGATE_")
    }
    assert given - known == set()


@needs_kustomize
@overlay
def test_a_node_takes_its_settings(manifests: Manifests, certificates: Path) -> None:
    settings = config.load(environ=environment_of(manifests, POD, certificates)).settings
    pod = manifests.nodes
    assert settings.listen.port == pod.ports["s3"]
    assert settings.admin_listen.port == pod.ports["admin"]
    assert (
        str(values.parse_address(pod.variables({}, POD, SECRET)["TIERGATE_ADVERTISE"]))
        == f"10.1.2.3:{pod.ports['peer']}"
    )


@needs_kustomize
@overlay
def test_a_pod_without_a_zone_still_starts(manifests: Manifests, certificates: Path) -> None:
    pod = {name: value for name, value in POD.items() if "zone" not in name}
    environment = environment_of(manifests, pod, certificates)
    assert environment["TIERGATE_ZONE"] == ""
    config.load(environ=environment)


@needs_kustomize
@overlay
def test_the_numbers_of_memory_agree(manifests: Manifests) -> None:
    pod, given = manifests.nodes, manifests.settings
    limit_bytes = values.parse_size(given["TIERGATE_MEMORY_LIMIT"])
    volume = pod.mounted(given["TIERGATE_MEMORY_DIR"])["emptyDir"]
    resources = pod.container["resources"]
    assert volume["medium"] == "Memory"
    assert quantity_bytes(volume["sizeLimit"]) >= limit_bytes
    processes_bytes = (int(given["TIERGATE_WORKERS"]) + 1) * (512 << 20)
    assert quantity_bytes(resources["limits"]["memory"]) >= quantity_bytes(volume["sizeLimit"]) + processes_bytes
    assert resources["requests"]["memory"] == resources["limits"]["memory"], "memory that others could have taken"


@needs_kustomize
@overlay
def test_a_pod_is_given_the_time_of_its_drain(manifests: Manifests) -> None:
    given = manifests.settings
    needed_s = sum(values.parse_duration(given[f"TIERGATE_{name}"]) for name in ("DRAIN", "SHUTDOWN_GRACE"))
    assert manifests.nodes.pod["terminationGracePeriodSeconds"] >= needed_s + 60
    assert manifests.nodes.container["livenessProbe"]["terminationGracePeriodSeconds"] < needed_s


@needs_kustomize
@overlay
def test_the_container_runs_what_the_image_can(manifests: Manifests) -> None:
    image = Image.read()
    assert "command" not in manifests.nodes.container
    assert [*image.entry, *manifests.nodes.container["args"]] == image.command
    user, _, group = image.of("USER")[0].partition(":")
    context = manifests.nodes.pod["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (int(user), int(group), int(group))
    assert manifests.settings["TIERGATE_MEMORY_DIR"] == image.environment["TIERGATE_MEMORY_DIR"]


# -- names that must meet
@needs_kustomize
@overlay
def test_ports_and_selectors_meet(manifests: Manifests) -> None:
    for service in manifests.of("Service"):
        (workload,) = selected(service["spec"]["selector"], manifests.workloads)
        for port in service["spec"]["ports"]:
            assert workload.ports[port["targetPort"]] == port["port"], service["metadata"]["name"]
    for workload in manifests.workloads:
        assert workload.manifest["spec"]["selector"]["matchLabels"].items() <= workload.labels.items()
        probes = [workload.container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")]
        assert {probe["port"] for probe in probes} <= set(workload.ports)
    for budget in manifests.of("PodDisruptionBudget"):
        (workload,) = selected(budget["spec"]["selector"]["matchLabels"], manifests.workloads)
        assert budget["spec"]["maxUnavailable"] < workload.manifest["spec"]["replicas"] / 2


@needs_kustomize
@overlay
def test_network_policies_meet_what_they_are_for(manifests: Manifests) -> None:
    covered: set[str] = set()
    for policy in manifests.of("NetworkPolicy"):
        (workload,) = selected(policy["spec"]["podSelector"]["matchLabels"], manifests.workloads)
        covered.add(workload.name)
        rules = policy["spec"]["ingress"]
        assert {port["port"] for rule in rules for port in rule["ports"]} == set(workload.ports)
        open_to_all = {port["port"] for rule in rules if "from" not in rule for port in rule["ports"]}
        assert open_to_all <= {"s3"}, "clients sign; nobody else is let in from everywhere"
        for peer in (one for rule in rules for one in rule.get("from", ()) if "podSelector" in one):
            labels = peer["podSelector"]["matchLabels"]
            assert list(selected(labels, manifests.workloads)), labels
    assert covered == {workload.name for workload in manifests.workloads}


@needs_kustomize
@overlay
def test_every_secret_is_one_that_the_page_makes(manifests: Manifests) -> None:
    made = {"tiergate-keys", "tiergate-origin", "tiergate-etcd-server", "tiergate-etcd-client"}
    assert {f"tiergate-etcd-{name}" for name in re.findall(r"^sign (\w+)", README, re.MULTILINE)} < made
    assert "secret generic tiergate-keys" in README
    keys = set(re.findall(r"--from-literal=([\w-]+)=", README)) | {"etcd-password"}
    for workload in manifests.workloads:
        for variable in workload.container["env"]:
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            assert reference is None or (reference["name"] == "tiergate-keys" and reference["key"] in keys), reference
        for volume in workload.volumes.values():
            assert "secret" not in volume or volume["secret"]["secretName"] in made
    assert manifests.of("Secret") == [], "a secret in the repository"


@needs_kustomize
@overlay
def test_files_that_settings_name_are_mounted(manifests: Manifests) -> None:
    for setting in ("TIERGATE_ETCD_TLS_CA", "TIERGATE_ETCD_TLS_CERT", "TIERGATE_ETCD_TLS_KEY"):
        path = Path(manifests.settings[setting])
        assert "secret" in manifests.nodes.mounted(str(path))
        assert f"--from-file={path.name}" in README
    for workload in manifests.workloads:
        claims = {claim["metadata"]["name"] for claim in workload.manifest["spec"].get("volumeClaimTemplates", ())}
        mounts = {mount["name"] for mount in workload.container["volumeMounts"]}
        assert mounts == set(workload.volumes) | claims


# -- who may what
@needs_kustomize
@overlay
def test_pods_keep_to_the_restricted_level(manifests: Manifests) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted"""
    namespace = manifests.one("Namespace")["metadata"]["labels"]
    assert namespace["pod-security.kubernetes.io/enforce"] == "restricted"
    for workload in manifests.workloads:
        pod, container = workload.pod, workload.container["securityContext"]
        assert not any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert container["allowPrivilegeEscalation"] is False
        assert container["readOnlyRootFilesystem"] is True
        assert container["capabilities"] == {"drop": ["ALL"]}
        assert all(set(volume) - {"name"} <= {"emptyDir", "secret"} for volume in workload.volumes.values())


@needs_kustomize
@overlay
def test_nothing_may_ask_kubernetes_for_anything(manifests: Manifests) -> None:
    assert [each["kind"] for each in manifests.all if "rbac" in each["apiVersion"]] == []
    for workload in manifests.workloads:
        assert workload.pod["automountServiceAccountToken"] is False
        assert workload.pod["enableServiceLinks"] is False, "its variables would be taken for settings"


@needs_kustomize
@overlay
def test_clients_are_led_to_the_node_of_their_own_machine(manifests: Manifests) -> None:
    service = manifests.one("Service", "tiergate")["spec"]
    assert service["internalTrafficPolicy"] == "Local"
    assert service["publishNotReadyAddresses"] is True, "without the directory there would be no node to read from"
    assert manifests.one("Service", "tiergate-peers")["spec"]["clusterIP"] == "None"


# -- the memory daemon
@needs_kustomize
def test_the_stock_package_finds_the_node_of_its_machine(certificates: Path) -> None:
    manifests = rendered("memory-daemon")
    wanted = urlsplit(InMemoryClientConfig().base_url)
    (space, alias) = documents((KUBERNETES / "hyperpod" / "namespace.yaml").read_text()) + documents(
        (KUBERNETES / "hyperpod" / "service.yaml").read_text()
    )
    assert wanted.hostname == f"{alias['metadata']['name']}.{space['metadata']['name']}.svc.cluster.local"
    service = manifests.one("Service", "tiergate")
    named = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc.cluster.local"
    assert (alias["spec"]["type"], alias["spec"]["externalName"]) == ("ExternalName", named)
    assert wanted.port in [port["port"] for port in service["spec"]["ports"]]
    settings = config.load(environ=environment_of(manifests, POD, certificates)).settings
    assert settings.daemon_listen is not None
    assert settings.daemon_listen.port == manifests.nodes.ports["daemon"] == wanted.port
    assert settings.daemon_allow, "the protocol has no credentials"
    (rule,) = (
        rule
        for rule in manifests.one("NetworkPolicy", "tiergate")["spec"]["ingress"]
        if {"port": "daemon"} in rule["ports"]
    )
    ((label, value),) = rule["from"][0]["namespaceSelector"]["matchLabels"].items()
    assert f"{label}={value}" in README


@needs_kustomize
def test_only_who_asks_for_it_gets_the_memory_daemon() -> None:
    for name in OVERLAYS:
        if name != "memory-daemon":
            assert "daemon" not in rendered(name).nodes.ports, name
            assert not [each for each in rendered(name).settings if each.startswith("TIERGATE_DAEMON")], name


# -- etcd
def members() -> Workload:
    return Workload(rendered("own-etcd").one("StatefulSet"))


@needs_kustomize
def test_members_of_etcd_and_nodes_know_each_other() -> None:
    etcd, settings = members(), rendered("own-etcd").settings
    service = etcd.manifest["spec"]["serviceName"]
    names = [f"{etcd.name}-{number}" for number in range(etcd.manifest["spec"]["replicas"])]
    cluster = urlsplit(settings["TIERGATE_CLUSTER"])
    assert cluster.scheme == "etcds"
    assert cluster.netloc.split(",") == [f"{name}.{service}:{etcd.ports['client']}" for name in names]
    (initial,) = (word for word in etcd.container["command"] if word.startswith("--initial-cluster="))
    peers = ",".join(f"{name}=https://{name}.{service}:{etcd.ports['peer']}" for name in names)
    assert initial == f"--initial-cluster={peers}"
    assert [f"DNS:{name}.{service}" in README for name in names] == [True] * len(names)


@needs_kustomize
def test_members_of_etcd_are_kept_apart_and_keep_their_data() -> None:
    etcd = members()
    (rule,) = etcd.pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert rule["labelSelector"]["matchLabels"].items() <= etcd.labels.items()
    (claim,) = etcd.manifest["spec"]["volumeClaimTemplates"]
    quota_bytes = int(next(word for word in etcd.container["command"] if "quota" in word).partition("=")[2])
    assert quantity_bytes(claim["spec"]["resources"]["requests"]["storage"]) >= 2 * quota_bytes
    assert etcd.manifest["spec"]["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Retain"


@needs_etcd
@needs_kustomize
def test_flags_of_etcd_exist() -> None:
    known = subprocess.run([etcd_path(), "--help"], capture_output=True, text=True, check=True)
    flags = {word.partition("=")[0] for word in members().container["command"][1:]}
    assert (
        flags - NEWER_THAN_TESTED - set(re.findall(r"^ +(--[a-z-]+)", known.stdout + known.stderr, re.MULTILINE))
        == set()
    )


def test_the_page_names_the_oldest_version() -> None:
    assert f"Kubernetes {OLDEST} or newer" in README


# -- what they run
@pytest.fixture(scope="module")
def endpoints(certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Three members of etcd by the StatefulSet's command."""
    etcd = members()
    names = [f"{etcd.name}-{number}" for number in range(etcd.manifest["spec"]["replicas"])]
    with running(etcd.container["command"], names, certificates, tmp_path_factory.mktemp("etcd")) as endpoints:
        yield endpoints


@needs_etcd
@needs_kustomize
async def test_members_of_etcd_serve_whom_their_authority_knows(endpoints: list[str], certificates: Path) -> None:
    files = {
        name: (certificates / "tiergate-etcd-client" / name).read_bytes() for name in ("ca.crt", "tls.crt", "tls.key")
    }
    known = Tls(files["ca.crt"], files["tls.crt"], files["tls.key"])
    client = EtcdClient(Access(endpoints, known), SystemClock(), random.Random(0))
    try:
        assert (await client.read(Range(b"deployed"))).revision > 0
    finally:
        await client.close()
    stranger = EtcdClient(Access(endpoints, Tls(files["ca.crt"])), SystemClock(), random.Random(0), patience_s=2)
    try:
        with pytest.raises(DirectoryUnavailableError):
            await stranger.read(Range(b"deployed"))
    finally:
        await stranger.close()


@needs_etcd
@needs_kustomize
def test_pods_meet_in_their_etcd(
    endpoints: list[str], certificates: Path, programs: Path, origin: MotoOrigin, memory: Path, tmp_path: Path
) -> None:
    manifests = rendered("own-etcd")
    names = ["gpu-0001", "gpu-0002"]
    nodes: list[Served] = []
    with ExitStack() as stack:
        for name in names:
            environment = environment_of(manifests, POD | {"spec.nodeName": name}, certificates)
            environment |= local(memory / name, origin.endpoint) | {
                "PATH": str(programs),
                "TIERGATE_CLUSTER": f"etcds://{','.join(endpoints)}",
                "TIERGATE_ADVERTISE": "127.0.0.1:0",
                # Nobody reads what this test leaves in memory.
                "TIERGATE_DRAIN": "0",
            }
            command = [*Image.read().entry, *manifests.nodes.container["args"]]
            nodes.append(stack.enter_context(served(command, environment, tmp_path / name)))
        nodes[0].wait_status(lambda status: [each["node"] for each in status["cluster"]["nodes"]] == names)


def test_pages_name_files_that_exist() -> None:
    for page in (ROOT / "deploy").rglob("README.md"):
        named = re.findall(r"`((?:overlays|base|etcd)/[\w./-]*)`", page.read_text())
        assert [name for name in named if not (page.parent / name).exists()] == []
