"""Members of etcd started by the words of a deployment, with certificates made by the words of its page."""

import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from tests.deploy.fresh import DEADLINE_S
from tests.deploy.manifests import KUBERNETES

from tiergate.testing.etcd import etcd_path
from tiergate.testing.origins import free_ports

NEWER_THAN_TESTED = {"--listen-client-http-urls"}
"""etcd's flags that the version tests run with does not know yet."""

_POLL_S = 0.05
_KUBECTL = """
kubectl() {  # -n tiergate create secret generic NAME --from-file=...
    mkdir "$6"
    for word in "${@:7}"; do
        source=${word#--from-file=}
        case $source in *=*) cp "${source#*=}" "$6/${source%%=*}";; *) cp "$source" "$6/";; esac
    done
}
"""


def make_certificates(folder: Path) -> Path:
    """Runs what the page says, with folders in the place of Secrets: `tiergate-etcd-server`, `tiergate-etcd-client`."""
    (recipe,) = re.findall(r"```bash\n(openssl req -x509.*?)```", (KUBERNETES / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        ["bash", "-euc", _KUBECTL + recipe], cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return folder


@contextmanager
def running(command: Sequence[str], names: Sequence[str], certificates: Path, folder: Path) -> Iterator[list[str]]:
    """Each member runs the command with this machine's places in it; gives host:port of each once all are healthy."""
    ports = free_ports(3 * len(names))
    clients, peers, metrics = (ports[index::3] for index in range(3))
    cluster = ",".join(f"{name}=https://127.0.0.1:{port}" for name, port in zip(names, peers, strict=True))
    with ExitStack() as stack:
        processes: list[tuple[subprocess.Popen[bytes], int, Path]] = []
        for name, client, peer, metric in zip(names, clients, peers, metrics, strict=True):
            # A member's name, addresses and cluster may also come as variables.
            here = {
                "--name": name,
                "--data-dir": str(folder / name),
                "--listen-client-urls": f"https://127.0.0.1:{client}",
                "--advertise-client-urls": f"https://127.0.0.1:{client}",
                "--listen-peer-urls": f"https://127.0.0.1:{peer}",
                "--initial-advertise-peer-urls": f"https://127.0.0.1:{peer}",
                "--initial-cluster": cluster,
                "--listen-metrics-urls": f"http://127.0.0.1:{metric}",
            }
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(
                [etcd_path(), *_placed(command, here, certificates)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append((process, metric, folder / f"{name}.log"))
        for process, metric, path in processes:
            _wait_healthy(process, metric, path)
        yield [f"127.0.0.1:{port}" for port in clients]


def flags_of(command: Sequence[str]) -> dict[str, str]:
    """The flags of a command with their values, empty where they have none."""
    pairs = (word.partition("=") for word in command[1:])
    return {flag: value for flag, _, value in pairs}


def _placed(command: Sequence[str], here: dict[str, str], certificates: Path) -> Iterator[str]:
    for flag, value in (flags_of(command) | here).items():
        if flag not in NEWER_THAN_TESTED:
            value = value.replace("/tls/", f"{certificates / 'tiergate-etcd-server'}/")
            yield f"{flag}={value}" if value else flag


def _wait_healthy(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    opener = build_opener(ProxyHandler({}))
    for _ in range(int(DEADLINE_S / _POLL_S)):
        assert process.poll() is None, log.read_text("utf-8", "replace")[-2000:]
        try:
            with opener.open(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if b'"true"' in answer.read():
                    return
        except URLError:
            pass
        time.sleep(_POLL_S)
    raise TimeoutError(log.read_text("utf-8", "replace")[-2000:])
