"""Rules between settings. Each yields the fields it is about (the one to blame first) and what is wrong."""

from collections.abc import Iterator
from urllib.parse import urlsplit

from tiergate.config.settings import DECLARATIONS, Settings
from tiergate.config.values import Address, ClientAuth, etcd_place, format_duration, format_size

Broken = tuple[tuple[str, ...], str]
_ANY_HOST = ("0.0.0.0", "::")
_DEFAULT_PORTS = {"http": 80, "https": 443}


def broken_rules(settings: Settings) -> Iterator[Broken]:
    """All rules that the settings break."""
    yield from _credentials(settings)
    yield from _exposure(settings)
    yield from _addresses(settings)
    yield from _cluster(settings)
    yield from _daemon(settings)
    yield from _amounts(settings)


def _credentials(settings: Settings) -> Iterator[Broken]:
    has_id, has_secret = bool(settings.access_key_id), settings.secret_access_key is not None
    if has_id and not has_secret:
        yield ("access_key_id", "secret_access_key"), "is given without secret_access_key"
    if has_secret and not has_id:
        yield ("secret_access_key", "access_key_id"), "is given without access_key_id"
    if settings.client_auth is ClientAuth.KEYS and not has_id:
        yield (
            ("client_auth", "access_key_id"),
            "`keys` needs TIERGATE_ACCESS_KEY_ID and TIERGATE_SECRET_ACCESS_KEY",
        )
    if settings.client_auth is not ClientAuth.KEYS and has_id:
        yield (
            ("client_auth", "access_key_id"),
            f"`{settings.client_auth}` contradicts the access_key_id that is given",
        )


def _exposure(settings: Settings) -> Iterator[Broken]:
    """Nobody gets in who does not belong: without credentials only this machine may connect."""
    if settings.client_auth is not ClientAuth.NONE:
        return
    for field, address in (("listen", settings.listen), ("admin_listen", settings.admin_listen)):
        if not address.is_loopback:
            yield (
                (field, "client_auth", "access_key_id"),
                f"{address} is not a loopback address and clients need no credentials "
                "(set TIERGATE_ACCESS_KEY_ID and TIERGATE_SECRET_ACCESS_KEY)",
            )


def _cluster(settings: Settings) -> Iterator[Broken]:
    if not settings.cluster:
        for field in ("node_name", "advertise", "cluster_secret"):
            if getattr(settings, field):
                yield (field, "cluster"), "is given without cluster"
        return
    for field in ("node_name", "advertise"):
        if not getattr(settings, field):
            yield ("cluster", field), f"needs {field} too"
    tls = ("peer_tls_cert", "peer_tls_key", "peer_tls_ca")
    given = [field for field in tls if getattr(settings, field)]
    if given and len(given) < len(tls):
        missing = next(field for field in tls if field not in given)
        yield (given[0], *tls), f"is given without {missing}"
    for field, address in (("advertise", settings.advertise), ("peer_listen", settings.peer_listen)):
        if address and not address.is_loopback and not given and settings.cluster_secret is None:
            yield (
                (field, "advertise", "cluster_secret", *tls),
                f"{address} is not a loopback address and peers need no credentials "
                "(set TIERGATE_CLUSTER_SECRET, or peer_tls_cert, peer_tls_key and peer_tls_ca)",
            )
    if settings.advertise and settings.advertise.host in _ANY_HOST:
        yield ("advertise",), f"{settings.advertise} is no address that peers can reach"
    yield from _etcd(settings)


def _daemon(settings: Settings) -> Iterator[Broken]:
    """The memory daemon's protocol has no credentials: who may use it must be said where others reach it."""
    address = settings.daemon_listen
    if address is None:
        if settings.daemon_allow:
            yield ("daemon_allow", "daemon_listen"), "is given without daemon_listen"
    elif not settings.daemon_uri:
        yield ("daemon_listen", "daemon_uri"), "needs daemon_uri too: where shards lie"
    elif not address.is_loopback and not settings.daemon_allow:
        yield (
            ("daemon_listen", "daemon_allow"),
            f"{address} is not a loopback address and the protocol has no credentials "
            "(name the networks that may use it: daemon_allow)",
        )
    place = next((each for each in settings.prefixes if each.is_memory_only), None)
    for other in settings.prefixes:
        if place is None or other.is_memory_only or other.bucket != place.bucket:
            continue
        shown = f"s3://{other.bucket}/{other.prefix}"
        if other.prefix.startswith(place.prefix):
            yield ("daemon_uri", "prefixes"), f"{settings.daemon_uri} holds a prefix with settings of its own, {shown}"
        elif other.is_run and place.prefix.startswith(other.prefix):
            yield ("daemon_uri", "prefixes"), f"{settings.daemon_uri} lies in a run with persist or keep, {shown}"


def _etcd(settings: Settings) -> Iterator[Broken]:
    for one, other in (("etcd_user", "etcd_password"), ("etcd_tls_cert", "etcd_tls_key")):
        for field, missing in ((one, other), (other, one)):
            if getattr(settings, field) and not getattr(settings, missing):
                yield (field, missing), f"is given without {missing}"
    for field in ("etcd_tls_ca", "etcd_tls_cert"):
        if getattr(settings, field) and not etcd_place(settings.cluster).tls:
            yield (field, "cluster"), "is given, but cluster begins with etcd:// (write etcds://)"


def _addresses(settings: Settings) -> Iterator[Broken]:
    own = [("listen", settings.listen), ("admin_listen", settings.admin_listen)]
    if settings.peer_listen:
        own.append(("peer_listen", settings.peer_listen))
    if settings.daemon_listen:
        own.append(("daemon_listen", settings.daemon_listen))
    for index, (field, address) in enumerate(own):
        for other, taken in own[:index]:
            if address == taken and address.port:
                yield (field, other), f"{address} is the same as {other}"
    if settings.origin:
        parts = urlsplit(settings.origin)
        origin = Address(parts.hostname or "", parts.port or _DEFAULT_PORTS[parts.scheme])
        for field, address in own:
            reached = address.is_loopback or address.host in _ANY_HOST
            if origin == address or (origin.port == address.port and origin.is_loopback and reached):
                yield ("origin", field), f"{settings.origin} is this node itself ({field} is {address})"


def _amounts(settings: Settings) -> Iterator[Broken]:
    for small, large, shown in (
        ("dirty_age_slow_s", "dirty_age_limit_s", format_duration),
        ("dirty_size_slow_bytes", "dirty_size_limit_bytes", format_size),
        ("marker_hold_s", "dirty_age_slow_s", format_duration),
        ("marker_hold_s", "dirty_age_limit_s", format_duration),
        ("origin_backoff_s", "origin_backoff_max_s", format_duration),
    ):
        low, high = getattr(settings, small), getattr(settings, large)
        never = large.startswith("dirty_") and high == 0
        if low > high and not never:
            yield (small, large), f"{shown(low)} is more than {DECLARATIONS[large].name} ({shown(high)})"
