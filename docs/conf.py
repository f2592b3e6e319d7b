"""The site: `make docs` makes it of the same Markdown files that are read in the repository.

Sphinx with furo, and not MkDocs. Sphinx takes pages from every folder, so a link is the same in
both places, and it checks links and anchors itself. MkDocs had its last release, 1.6.1, in 2024,
and Material for MkDocs is in maintenance.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
project = "Preference recipes"
copyright = "the authors of Preference recipes, Apache 2.0"
version = release = ""
extensions = ["myst_parser"]
myst_heading_anchors = 4  # as GitHub names them
html_theme = "furo"
html_title = project
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
smartquotes = False  # it would make one dash of the two of a flag
highlight_language = "none"  # of commands; blocks of Python say so
linkcheck_anchors = False  # GitHub's are made by a script

# What is read in this order, in four parts. Sphinx refuses a page that is in none.
PARTS = {
    "Start": [
        "README",
        *("docs/run", "docs/data", "docs/launching", "docs/memory", "docs/troubleshooting"),
        "AGENTS",
    ],
    "Recipes": [
        *(f"docs/{name}" for name in ("sft", "reward", "dpo", "kto", "ppo", "grpo", "distill")),
        *("docs/lora", "docs/images", "docs/environments", "docs/vllm", "docs/evaluation"),
        "docs/rows",
        "docs/checkpoints",
        "forks/README",
    ],
    "How it works": [
        *(
            "docs/reading",
            "docs/forking",
            "docs/report",
            "docs/counting",
            "docs/fp16",
            "docs/chat_templates",
        ),
        *("benchmarks/README", "findings/README", "common/README"),
        "preference_recipes/README",
        *(f"preference_recipes/{name}/README" for name in ("data", "models", "rollouts", "tools")),
    ],
    "Reference": [
        *("docs/arguments", "docs/metrics", "docs/words", "docs/faq", "assets/README"),
        *("tests/README", "CONTRIBUTING", "SECURITY", "CHANGELOG"),
    ],
}
# Without those that are not here, such as the gallery of forks.
PARTS = {
    part: [page for page in pages if (ROOT / f"{page}.md").exists()]
    for part, pages in PARTS.items()
}
# Titles in the navigation, where the page has another one.
TITLES = {
    "README": "Quick start",
    "docs/report": "The contract",
    "preference_recipes/README": "The libraries",
}
root_doc = "docs/README"
include_patterns = [f"{page}.md" for pages in [[root_doc], *PARTS.values()] for page in pages]
include_patterns += ["docs/*.md"]


def add_navigation(app, page: str, source: list[str]) -> None:
    """Adds what the repository need not show: the parts, at the end of the first page."""
    if page != root_doc:
        return
    for part, names in PARTS.items():
        entries = [f"{TITLES[name]} </{name}>" if name in TITLES else f"/{name}" for name in names]
        lines = ["```{toctree}", ":hidden:", f":caption: {part}", "", *entries, "```"]
        source[0] += "\n" + "\n".join(lines) + "\n"


def lead_to_the_first_page(app, error) -> None:
    text = f'<meta http-equiv="refresh" content="0; url={root_doc}.html"><title>{project}</title>\n'
    (Path(app.outdir) / "index.html").write_text(text)


def setup(app) -> None:
    app.connect("source-read", add_navigation)
    app.connect("build-finished", lead_to_the_first_page)
