"""The documentation as a folder of pages: the reference from the docstrings, the glossary, the notebooks, the paper.

    $ python docs/build.py site

Needs the extra ``docs``. A warning of pdoc, such as a docstring it cannot read, is an error.
"""

import json
import re
import sys
import warnings
from html import escape
from pathlib import Path

import pdoc
from pdoc.render_helpers import to_html

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # this tree, whatever is installed

import torchgmc  # noqa: E402

#: What users import: the package, and its public modules. What lies in folders is documented where it is imported from.
MODULES = ["torchgmc", *(f"torchgmc.{name}" for name in torchgmc._MODULES)]
INTERNAL = [r"!torchgmc\.(audits|cli|demo|deploy|engine|groups|__main__).*", r"!torchgmc\.\w+\..*"]
FRAME = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<script>window.MathJax = {{tex: {{inlineMath: [["$", "$"], ["\\\\(", "\\\\)"]]}}}};</script>
<script id="MathJax-script" async src="https://cdn.jsdelivr.net/npm/mathjax@3/es5/tex-mml-chtml.js"></script>
<style>:root {{color-scheme: light dark}}
body {{max-width: 60rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 system-ui, sans-serif}}
pre {{overflow-x: auto; padding: .7rem; background: #8882}} img {{max-width: 100%}} table {{border-collapse: collapse}}
td, th {{padding: .2rem .6rem; border: 1px solid #8886; text-align: left}}</style></head>
<body><p><a href="index.html">torchgmc {version}</a></p>{body}</body></html>
"""


def main(folder: str) -> int:
    """Builds all pages."""
    out = Path(folder)
    convert = pdoc.docstrings.convert  # which does not know that "~" in a reference hides its module
    pdoc.docstrings.convert = lambda text, *more: convert(re.sub(r"`~(?:\w+\.)*(\w+`)", r"`\1", text), *more)
    pdoc.render.configure(docformat="google", math=True, show_source=False, footer_text=f"torchgmc {torchgmc.__version__}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The package brings those of its modules that are in its `__all__`.
        others = [name for name in MODULES if name.removeprefix("torchgmc.") not in torchgmc.__all__]
        pdoc.pdoc(*others, *INTERNAL, output_directory=out)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    glossary = re.search(r"^## Words and symbols\n.*?(?=^## )", readme, flags=re.MULTILINE | re.DOTALL)
    assert glossary is not None
    pages = {"glossary.html": ("Words and symbols", glossary.group())}
    for path in sorted((ROOT / "notebooks").glob("[a-z]*.md")):  # not its README
        text = path.read_text(encoding="utf-8")
        pages[f"{path.stem}.html"] = (text.splitlines()[0].removeprefix("# "), text)
    pages["changelog.html"] = ("Changes", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        pages[f"{path.stem}.html"] = (path.stem.replace("_", " "), notebook(json.loads(path.read_text(encoding="utf-8"))))
    listed = "".join(f"\n- [{title}]({name})" for name, (title, _) in pages.items())
    reference = "".join(f"\n- [{name}]({name.replace('.', '/')}.html)" for name in MODULES)
    first = next(part for part in readme.split("\n\n")[1:] if not part.startswith("[!"))  # after the badges
    pages["index.html"] = ("torchgmc", f"# torchgmc\n\n{first}\n\n## Pages\n{listed}\n\n## Reference\n{reference}\n")
    for name, (title, text) in pages.items():
        body = re.sub(r'href="([\w-]+)\.(?:ipynb|md)', r'href="\1.html', str(to_html(text)))
        page = FRAME.format(title=escape(title), version=torchgmc.__version__, body=body)
        (out / name).write_text(page, encoding="utf-8")
    return 0


def notebook(content: dict) -> str:
    """A notebook as Markdown: text, code, and what the code printed and drew."""
    parts = []
    for cell in content["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![a figure](data:image/png;base64,{''.join(data['image/png']).strip()})")
            else:
                shown = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{shown}\n```" if shown.strip() else "")
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
