"""The command line: exit statuses, and errors of one line each."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from tiergate import cli

STATUS = {
    "ready": True,
    "memory": {"used_bytes": 3_100_000_000, "age_s": 90},
    "quarantine": [{"key": "[red]k", "reason": "403"}],
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")


def found(step: int | None, memory: str, s3: str, to_s3_s: float | None = None, **more: object) -> dict[str, object]:
    """A set as the admin address tells of it."""
    tiers = {"memory": (memory, 3, 2), "s3": (s3, 1, 1)}
    return {
        "uri": f"s3://b/[red]run/step_{step}/",
        "layout": "dcp",
        "step": step,
        "objects_count": 3,
        "size_bytes": 5_000_000_000,
        "age_s": 7200.0,
        "to_s3_s": to_s3_s,
        "is_parked": False,
        "fault": "",
        "tiers": {
            tier: {"state": state, "objects_count": count, "copies_count": copies_count, "missing": ["run/x"]}
            for tier, (state, count, copies_count) in tiers.items()
        },
        **more,
    }


PLACE = {"uri": "s3://b/", "unseen": [], "origin_fault": "", "fault": ""}
GOOD = [found(0, "complete", "uploading", 90.0), found(1, "absent", "complete", 0.0), found(2, "complete", "uploading")]
GOOD += [found(None, "receiving", "absent"), found(3, "complete", "absent", is_parked=True)]
CHECKPOINTS: dict[str, tuple[int, dict[str, object]]] = {
    "": (200, {"places": [], "sets": []}),
    "s3://b/good/": (200, {"places": [PLACE], "sets": GOOD}),
    "s3://b/bad/": (200, {"places": [PLACE], "sets": [found(4, "damaged", "quarantined")]}),
    "s3://b/doubt/": (200, {"places": [PLACE], "sets": [found(5, "absent", "unknown", fault="403")]}),
    "s3://b/cut/": (200, {"places": [PLACE | {"unseen": ["s3"], "origin_fault": "away"}], "sets": GOOD[:1]}),
    "s3://gone/": (404, {"error": "no such bucket"}),
    "s3://busy/": (503, {"error": "the directory does not answer"}),
}


class _Admin(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, answer = 200, STATUS if self.path == "/status" else []
        path, _, query = self.path.partition("?")
        if path == "/checkpoints":
            status, answer = CHECKPOINTS[parse_qs(query).get("uri", [""])[0]]
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        line = {"total_count": 2, "total_bytes": 3, "done_count": 1, "done_bytes": 1}
        failure = {"uri": "s3://b/k", "reason": "[red]gone"}
        if "pin?" in self.path:
            gone = "/unpin" in self.path
            body = json.dumps({"error": "it is not pinned"} if gone else {"bytes": 7, "asked": self.path}).encode()
            self.send_response(404 if gone else 200)
            self.end_headers()
            self.wfile.write(body)
            return
        body = json.dumps(line | {"failures": [failure], "is_over": False, "fault": ""}).encode() + b"\n"
        if self.path.startswith("/promote?bucket=b&prefix=run%2F"):
            body = b'{"promoted": 1}'
        if self.path.startswith("/promote?bucket=b&prefix=none"):
            body = b'{"promoted": 0}'
        if "whole" in self.path:
            body += json.dumps(line | {"done_count": 2, "failures": [], "is_over": True, "fault": ""}).encode() + b"\n"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def admin() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Admin) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_check_config_of_a_good_configuration_succeeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-config", "--memory-dir", str(tmp_path / "m"), "--memory-limit", "8MiB"]) == 0
    assert capsys.readouterr().out == "configuration is valid\n"
    assert not (tmp_path / "m").exists()


def test_check_config_shows_values_and_sources_but_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERGATE_ACCESS_KEY_ID", "me")
    monkeypatch.setenv("TIERGATE_SECRET_ACCESS_KEY", "very-secret")
    words = ["check-config", "--show", "--memory-dir", str(tmp_path), "--memory-limit", "8MiB"]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "memory_limit = 8MiB  # --memory-limit\n" in shown
    assert "secret_access_key = ***  # TIERGATE_SECRET_ACCESS_KEY\n" in shown
    assert "very-secret" not in shown


def test_check_config_prints_one_line_for_each_fault(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check-config", "--workers", "x", "--memry-dir", "/x", "--listen=0.0.0.0:1"]
    assert cli.main(words) == cli.EXIT_USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        'tiergate: --workers: "x" is not a whole number',
        "tiergate: --memry-dir: there is no such flag, did you mean --memory-dir?",
        "tiergate: --listen: 0.0.0.0:1 is not a loopback address and clients need no credentials "
        "(set TIERGATE_ACCESS_KEY_ID and TIERGATE_SECRET_ACCESS_KEY)",
    ]


@pytest.mark.parametrize(
    ("folder", "limit", "message"),
    [
        ("{tmp}/file", "8MiB", "memory_dir: {tmp}/file is not a directory"),
        ("{tmp}/m", "900TiB", "free for a memory_limit of 900TiB"),
    ],
)
def test_check_config_looks_at_the_memory_folder(
    folder: str, limit: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    words = ["check-config", "--memory-dir", folder.format(tmp=tmp_path), "--memory-limit", limit]
    assert cli.main(words) == cli.EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert message.format(tmp=tmp_path) in line


MEMBER = ["--cluster", "etcd://127.0.0.1:1", "--node-name", "a", "--advertise", "127.0.0.1:0"]


@pytest.mark.parametrize("missing", ["grpc", "aetcd"])
def test_missing_package_of_a_cluster_is_one_line_that_says_how_to_get_it(
    missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    words = [*MEMBER, "--memory-dir", str(tmp_path / "m"), "--memory-limit", "8MiB"]
    for command, status in (("check-config", cli.EXIT_USAGE), ("serve", cli.EXIT_FAILED)):
        assert cli.main([command, *words]) == status
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(
            "a cluster needs packages that are not installed: install tiergate with its extra `cluster`"
        )
    assert not (tmp_path / "m").exists()


def test_serve_beyond_loopback_without_credentials_refuses_to_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "--listen", "0.0.0.0:0", "--memory-dir", str(tmp_path / "m")]
    assert cli.main(words) == cli.EXIT_USAGE
    assert "is not a loopback address" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("words", [[], ["frobnicate"], ["serve", "--listen"]])
def test_wrong_usage_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == cli.EXIT_USAGE
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("tiergate: ")
    assert captured.out == ""


def test_status_prints_tables(admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--admin-listen", admin]) == 0
    shown = capsys.readouterr().out
    for text in ("ready", "true", "memory", "used_bytes", "3.1 GB", "1.5 min", "quarantine", "[red]k", "403"):
        assert text in shown


def test_status_json_is_what_the_node_said(admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--json", "--admin-listen", admin]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_status_of_a_node_on_port_0_asks_where_it_says(
    admin: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "node.json").write_text(json.dumps({"admin": f"http://{admin}"}))
    words = ["status", "--json", "--admin-listen", "127.0.0.1:0", "--memory-dir", str(tmp_path)]
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_status_without_a_node_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["status", "--admin-listen", "127.0.0.1:0", "--memory-dir", str(tmp_path)]
    assert cli.main(words) == cli.EXIT_UNREACHABLE
    assert capsys.readouterr().err == f"tiergate: no node serves from {tmp_path}\n"


def test_prefetch_shows_lines_where_there_is_no_terminal(admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prefetch", "s3://b/whole/", "--admin-listen", admin]) == 0
    shown = capsys.readouterr()
    assert shown.out == "1 of 2 objects, 1 byte of 3 bytes\n2 of 2 objects, 1 byte of 3 bytes\n"
    assert shown.err == "tiergate: s3://b/k could not be had: [red]gone\n"


def test_prefetch_that_breaks_off_fails(admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["prefetch", "s3://b", "--admin-listen", admin]) == cli.EXIT_UNREACHABLE
    assert capsys.readouterr().err.endswith("tiergate: the node went away before the prefetch was over\n")


def test_interrupted_command_ends_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tiergate.admin.url", interrupted)
    assert cli.main(["verify", "s3://b/run/"]) == cli.EXIT_INTERRUPTED
    assert capsys.readouterr() == ("", "")


def test_pin_says_how_much_and_unpin_what_is_wrong(admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pin", "s3://b/run/1/", "--admin-listen", admin]) == 0
    assert capsys.readouterr().out == "s3://b/run/1/ is pinned, with 7 bytes in this node's memory now\n"
    assert cli.main(["unpin", "s3://b/run/1/", "--admin-listen", admin]) == cli.EXIT_FAILED
    assert capsys.readouterr().err == "tiergate: s3://b/run/1/: it is not pinned\n"


def test_pin_without_a_node_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pin", "s3://b/run/", "--admin-listen", "127.0.0.1:0", "--memory-dir", str(tmp_path)]
    assert cli.main(words) == cli.EXIT_UNREACHABLE
    assert capsys.readouterr().err == f"tiergate: no node serves from {tmp_path}\n"


def test_checkpoints_are_a_table(admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoints", "s3://b/good/", "--admin-listen", admin]) == 0
    shown = capsys.readouterr()
    rows = [line for line in shown.out.splitlines() if "s3://b/[red]run/step_" in line]
    cells = [[cell.strip() for cell in row.replace("┃", "│").split("│")[2:-1]] for row in rows]
    assert cells == [
        ["dcp", "0", "5.0 GB", "3", "complete x2", "uploading 1 of 3", "2.0 h", "about 1.5 min"],
        ["dcp", "1", "5.0 GB", "3", "-", "complete", "2.0 h", "there"],
        ["dcp", "2", "5.0 GB", "3", "complete x2", "uploading 1 of 3", "2.0 h", "?"],
        ["dcp", "", "5.0 GB", "3", "receiving 3 of 3", "-", "2.0 h", "-"],
        ["dcp", "3", "5.0 GB", "3", "complete x2", "kept in memory", "2.0 h", "-"],
    ]
    assert shown.err == ""


@pytest.mark.parametrize(
    ("uri", "status", "said"),
    [
        ("s3://b/bad/", 1, "s3://b/[red]run/step_4/ is damaged in memory: run/x"),
        ("s3://b/bad/", 1, "s3://b/[red]run/step_4/ is quarantined in s3: run/x"),
        ("s3://b/doubt/", 6, "whether s3://b/[red]run/step_5/ is whole is not known now: 403"),
        ("s3://b/cut/", 6, "not all of s3://b/ was seen (s3): away"),
        ("s3://gone/", 1, "the checkpoints cannot be told: no such bucket"),
        ("s3://busy/", 6, "the checkpoints cannot be told: the directory does not answer"),
    ],
)
def test_checkpoints_say_what_is_wrong(
    uri: str, status: int, said: str, admin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["checkpoints", uri, "--admin-listen", admin]) == status
    assert f"tiergate: {said}\n" in capsys.readouterr().err


def test_checkpoints_of_all_buckets_may_be_none(admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoints", "--admin-listen", admin]) == 0
    assert capsys.readouterr().out == "no checkpoints\n"
    assert cli.main(["checkpoints", "--json", "--admin-listen", admin]) == 0
    assert json.loads(capsys.readouterr().out) == {"places": [], "sets": []}


def test_promote_says_how_much_goes(admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["promote", "s3://b/run/", "--admin-listen", admin]) == 0
    assert capsys.readouterr().out == "1 object goes to S3 from s3://b/run/\n"
    assert cli.main(["promote", "s3://b/none/", "--admin-listen", admin]) == 0
    assert capsys.readouterr().out == "nothing under s3://b/none/ stays in memory only\n"


def test_promote_that_is_answered_by_something_else_fails(admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["promote", "s3://other", "--admin-listen", admin]) == cli.EXIT_UNREACHABLE
    assert "it does not say how many" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["prefetch", "promote", "pin", "unpin", "checkpoints"])
@pytest.mark.parametrize("uri", ["b/k", "s3:///k", "http://b/k"])
def test_place_that_is_none_is_wrong_usage(command: str, uri: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, uri]) == cli.EXIT_USAGE
    assert "is not of the form s3://BUCKET/PREFIX" in capsys.readouterr().err


def test_module_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "tiergate", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tiergate ")
