"""Renders the reference of all settings, CONFIG.md."""

from itertools import groupby

from tiergate.config.declare import Declaration, show_value
from tiergate.config.settings import DECLARATIONS

_HEAD = """# Configuration

Generated from the declarations in `tiergate.config.settings`; do not edit.

Every setting can come from a TOML file (`--config FILE` or `TIERGATE_CONFIG`), an environment variable or a
flag, in rising order of precedence. An empty variable counts as absent. Lists are arrays in TOML and
separated by commas elsewhere; a stronger source replaces a list as a whole. `tiergate check-config` prints
one line per fault.

Sizes are written `2GiB`, `512MiB`, `10MB` or as a number of bytes, durations `250ms`, `60s`, `5m`, `6h`, `1d`
or as a number of seconds. The origin's credentials and region come from the standard AWS chain (environment,
profile, role).
"""

_PREFIX = """## Settings for a prefix

```toml
[[prefix]]
uri = "s3://bucket/run/"  # the keys it is for; the longest match wins
immutable = true          # keys are written once: a held copy is served without asking the origin
exclusive = true          # only gateways write here: an origin outage stops neither saves nor restores
etag = "exact"            # every body gets its exact MD5 as ETag; "auto": only up to exact_etag
fence = "strict"          # as the setting of the node
markers = ["*.done"]      # beside those of the node
replicas = 3              # in a cluster: copies before the acknowledgement, this node's included
persist = "every 5"       # which checkpoints of a run go to S3: "all", "none", "every 5", "every 30m"
keep = 2                  # the newest two whole checkpoints are evicted last; those that stay in memory only are
                          # dropped once so many newer complete ones are there
skip_superseded = true    # what write-back has not begun stays in memory if a newer complete one is there
promote_idle = "10m"      # so long after the run's last write its newest complete one goes to S3 ("0": never)
reuse = true              # a run: what did not change since an earlier set of it is copied inside the origin, not sent
```

With `persist` or `keep` the prefix is that of a *run* (its URI ends with a slash, or names a bucket), and each folder
right below it is a checkpoint. See [SEMANTICS](SEMANTICS.md#p14-what-stays-in-memory). All gateways of a bucket need
the same tables.

As a variable or a flag (which may be repeated) a prefix is an inline table:
`--prefix "{uri = 's3://bucket/run/', immutable = true}"`.
"""


def render_reference() -> str:
    """CONFIG.md: every setting with its three names, default and meaning."""
    pages = [_HEAD]
    for section, group in groupby(DECLARATIONS.values(), key=lambda declaration: declaration.section):
        rows = [
            f"## {section}\n",
            "| TOML key | variable | flag | default | meaning |",
            "|---|---|---|---|---|",
        ]
        rows += [_row(declaration) for declaration in group]
        pages.append("\n".join(rows) + "\n")
    pages.append(_PREFIX)
    return "\n".join(pages)


def _row(declaration: Declaration) -> str:
    meaning = declaration.help + _bounds(declaration)
    cells = (
        f"`{declaration.name}`",
        f"`{declaration.env}`",
        f"`{declaration.flag}`",
        declaration.default_text,
        meaning.replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |"


def _bounds(declaration: Declaration) -> str:
    parts = [
        f"{word} {show_value(declaration.field, bound)}"
        for word, bound in (("at least", declaration.minimum), ("at most", declaration.maximum))
        if bound is not None
    ]
    return f" ({', '.join(parts)})" if parts else ""
