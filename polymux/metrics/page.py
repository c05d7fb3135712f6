"""docs/metrics.md, made from the catalog.

python -m polymux.metrics.page > docs/metrics.md
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polymux.metrics.catalog import HTTP_METRICS, LABELS, REQUEST_METRICS, STAGE_METRICS, Spec

_INTRODUCTION = """\
# Metrics

Made by `python -m polymux.metrics.page` from `polymux/metrics/catalog.py`; not edited by hand.

`GET /metrics` answers in Prometheus' text format, in every state of the server. Counters only grow, also over restarts
of the model's process. Units are seconds and bytes. Prompts, ids and names that clients choose are never labels.

A histogram `x` is shown as `x_bucket`, `x_sum` and `x_count`. Besides these there are the usual `process_*` metrics of
the API process (CPU seconds, resident memory, open files).

`deploy/grafana/polymux.json` is a dashboard of them, to be imported into Grafana."""

_SECTIONS: tuple[tuple[str, str, Sequence[Spec]], ...] = (
    ("Requests", "Counted where requests are admitted: those of HTTP and of Python.", REQUEST_METRICS),
    (
        "Stages",
        "Reported by the model's process, at most 20 times a second and before every answer. Warm-up does not count.",
        STAGE_METRICS,
    ),
    ("HTTP", "Counted at the outer edge of the server, errors included.", HTTP_METRICS),
)


def page() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _INTRODUCTION
    for title, introduction, specs in _SECTIONS:
        yield f"\n## {title}\n\n{introduction}\n"
        yield "| name | kind | labels | |"
        yield "|---|---|---|---|"
        for spec in specs:
            labels = ", ".join(f"`{label}`" for label in spec.labels)
            yield f"| `{_shown(spec)}` | {spec.kind} | {labels} | {spec.help}{_buckets(spec)} |"
    yield "\n## Labels\n"
    yield "| label | |"
    yield "|---|---|"
    for label, meaning in LABELS.items():
        yield f"| `{label}` | {meaning} |"


def _shown(spec: Spec) -> str:
    return spec.name if spec.kind == "histogram" else spec.series[0]


def _buckets(spec: Spec) -> str:
    return f" Buckets: {', '.join(f'{bound:g}' for bound in spec.buckets)}." if spec.buckets else ""


if __name__ == "__main__":
    print(page(), end="")
