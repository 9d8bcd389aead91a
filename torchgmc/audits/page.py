"""Parts of a self-contained HTML page: tables, pictures, sections, and the frame around them.

No script, no font and no picture is fetched: figures are inlined, and follow the reader's light or dark setting. Every
text is escaped. A file appears whole or not at all.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from torchgmc.engine import checks
from torchgmc.engine.files import write_atomically

__all__ = ["Picture", "Section", "Table", "write_file", "write_html"]

VERDICTS = ("holds", "violated", "undecided")


@dataclass(frozen=True)
class Table:
    """Rows of text under column names; columns named in ``numeric`` are set flush right, those in ``wrapped`` may break lines.

    A cell that begins with one of the verdicts holds / violated / undecided is coloured. ``caption`` is a line above.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[str] = ()
    wrapped: Sequence[str] = ()
    caption: str = ""


@dataclass(frozen=True)
class Picture:
    """A PNG, and one for dark pages; ``text`` says what it shows to those who cannot see it."""

    png: bytes
    text: str
    dark: bytes | None = None


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, tables, pictures and a long text to unfold, shown in this order.

    ``long`` is (name, text): shown as it is, e.g. JSON, when the reader opens it.
    """

    heading: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    long: tuple[str, str] | None = None


def write_html(
    path: str | Path,
    title: str,
    certificate: str,
    sections: Sequence[Section],
    *,
    lead: str = "",
    verdict: str = "",
    facts: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
) -> Path:
    """Writes a page and returns its path.

    Args:
        path: of the file; an old one is replaced only when the new one is complete.
        title: of the page.
        certificate: one line that says what was shown and with what confidence.
        sections: in order.
        lead: a paragraph under the title.
        verdict: "holds", "violated" or "undecided": colours the certificate.
        facts: name and value of a few figures under the certificate.
        notes: warnings to read with it.
    """
    if verdict not in ("", *VERDICTS):
        raise ValueError(f"`verdict` must be one of {', '.join(VERDICTS)} or empty, got {verdict!r}.")
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    page = _PAGE.substitute(
        title=escape(title),
        lead=f'<p class="lead">{escape(lead)}</p>' if lead else "",
        kind=f"card {verdict}" if verdict else "card",
        certificate=escape(certificate),
        facts=f"<dl>{shown}</dl>" if shown else "",
        notes="".join(f'<p class="note">{escape(text)}</p>' for text in notes),
        sections="\n".join(map(_section, sections)),
    )
    return write_file(path, page.encode())


def write_file(path: str | Path, data: bytes) -> Path:
    """Writes a file so that whoever looks finds the old one or the new one, never half."""
    path = checks.path("path", path)
    write_atomically(path, lambda part: part.write_bytes(data))
    return path


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.heading)}</h2>"]
    parts += [f"<p>{escape(text)}</p>" for text in section.paragraphs]
    parts += [_table(table) for table in section.tables]
    parts += [_picture(picture) for picture in section.pictures]
    if section.long is not None:
        name, text = map(escape, section.long)
        parts.append(f"<details><summary>{name}</summary><pre>{text}</pre></details>")
    return f"<section>{''.join(parts)}</section>"


def _table(table: Table) -> str:
    kinds = {name: ' class="n"' for name in table.numeric} | {name: ' class="long"' for name in table.wrapped}
    right = [kinds.get(name, "") for name in table.columns]
    heads = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(table.columns, right, strict=True))
    rows = "".join(
        f"<tr>{''.join(_cell(text, kind) for text, kind in zip(row, right, strict=True))}</tr>" for row in table.rows
    )
    caption = f"<p>{escape(table.caption)}</p>" if table.caption else ""
    return (
        f'{caption}<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _cell(text: str, kind: str) -> str:
    verdict = next((word for word in VERDICTS if text.startswith(word)), None)
    inside = f'<span class="{verdict}">{escape(text)}</span>' if verdict else escape(text)
    return f"<td{kind}>{inside}</td>"


def _picture(picture: Picture) -> str:
    dark = ""
    if picture.dark is not None:
        dark = f'<source media="(prefers-color-scheme: dark)" srcset="{_inline(picture.dark)}">'
    return (
        f'<figure class="scroll" tabindex="0"><picture>{dark}'
        f'<img src="{_inline(picture.png)}" alt="{escape(picture.text)}"></picture>'
        f"<figcaption>{escape(picture.text)}</figcaption></figure>"
    )


def _inline(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="torchgmc">
<title>$title</title>
<link rel="icon" href="data:,">
<style>
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2430; --soft: #5a6275; --line: #d9dde5; --card: #f4f6fa;
  --good: #00694d; --bad: #a84300; --wait: #5a6275; --mark: #009e73; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171f; --ink: #e8eaf0; --soft: #a3abbd; --line: #3a4152;
  --card: #1d222d; --good: #4cc9a4; --bad: #f5924f; --wait: #a3abbd; } }
* { box-sizing: border-box; }
h1, h2, figcaption, summary { overflow-wrap: anywhere; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.55 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: clamp(1.5rem, 4vw, 2.1rem); line-height: 1.2; margin: 0 0 .75rem; text-wrap: balance; }
h2 { font-size: 1.25rem; margin: 2.75rem 0 .5rem; }
p { max-width: 46rem; margin: .5rem 0; overflow-wrap: anywhere; }
.lead { color: var(--soft); font-size: 1.05rem; }
.card { margin: 1.5rem 0 0; padding: 1rem 1.25rem; background: var(--card); border-left: .35rem solid var(--wait);
  border-radius: .25rem; color: var(--ink); font-weight: 400; }
.card.holds { border-color: var(--good); } .card.violated { border-color: var(--bad); }
.certificate { margin: 0; max-width: none; font-size: 1.1rem; }
dl { display: flex; flex-wrap: wrap; gap: .75rem 2rem; margin: 1rem 0 0; }
dt { color: var(--soft); font-size: .85rem; }
dd { margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.note { margin: 1rem 0 0; padding: .75rem 1.25rem; max-width: none; border: 1px solid var(--bad); border-radius: .25rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
div.scroll { background: linear-gradient(to right, var(--paper), transparent) 0 0 / 2rem 100%,
  linear-gradient(to left, var(--paper), transparent) 100% 0 / 2rem 100%, linear-gradient(to right, var(--line), transparent)
  0 0 / .6rem 100%, linear-gradient(to left, var(--line), transparent) 100% 0 / .6rem 100%; background-repeat: no-repeat;
  background-attachment: local, local, scroll, scroll; } /* a shade where more can be scrolled into view */
table { border-collapse: collapse; min-width: min(100%, 44rem); font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .9rem; text-align: left; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; }
th { color: var(--soft); font-weight: 600; font-size: .9rem; vertical-align: bottom; }
th.n, td.n { text-align: right; }
@media (max-width: 40rem) { table { font-size: .9rem; } th, td { padding: .4rem .5rem; } }
td .holds { color: var(--good); } td .violated { color: var(--bad); font-weight: 600; } td .undecided { color: var(--wait); }
figure { margin: 1rem 0; }
img { display: block; width: 100%; min-width: 38rem; height: auto; border-radius: .25rem; }
details { margin: 1rem 0; }
summary { cursor: pointer; color: var(--soft); }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); padding: 1rem; border-radius: .25rem;
  font: .85rem/1.5 ui-monospace, monospace; margin: .5rem 0 0; }
figcaption { color: var(--soft); font-size: .9rem; margin-top: .4rem; position: sticky; left: 0;
  max-width: calc(100vw - 2.5rem); }
td.long { white-space: normal; overflow-wrap: anywhere; min-width: 11rem; }
@media print { @page { margin: 15mm; } main { max-width: none; padding: 0; } body { font-size: 10pt; }
  .scroll { overflow: visible; } th, td { white-space: normal; padding: .25rem .5rem; }
  img { min-width: 0; max-height: 240mm; object-fit: contain; object-position: left; }
  h2, figure, tr, .card, .note { break-inside: avoid; } h2 { break-after: avoid; } thead { display: table-header-group; } }
</style>
</head>
<body>
<main>
<h1>$title</h1>
$lead
<div class="$kind"><p class="certificate">$certificate</p>$facts</div>
$notes
$sections
</main>
</body>
</html>
""")
