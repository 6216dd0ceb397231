"""Adds the page of commands to the site, and the files outside docs/ that pages link to.

Pages link to measurements, source files and CONTRIBUTING.md by relative paths, so that the links also work in a
clone. A folder has no page in a site; a link to one becomes plain text.
"""

import re
import sys
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import write_cli

ROOT: Final = Path(__file__).resolve().parents[1]
BESIDE: Final = "repository"  # of the site, where copies of those files are
_LINK: Final = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page of commands, every file that a page leads to, and those that they lead to in turn."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    added: set[str] = set()
    while waiting:
        page = waiting.pop()
        if not page.endswith(".md"):
            continue
        for target in _targets(page):
            outside = not target.startswith("docs/") and (ROOT / target).is_file()
            if outside and target not in added:
                added.add(target)
                waiting.append(target)
                files.append(File.generated(config, f"{BESIDE}/{target}", abs_src_path=str(ROOT / target)))
    files.append(File.generated(config, "cli.md", content=write_cli.page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to the copies."""
    here = page.file.src_uri
    source = here.removeprefix(f"{BESIDE}/") if here.startswith(f"{BESIDE}/") else f"docs/{here}"

    def lead(link: re.Match[str]) -> str:
        picture, text, target, anchor = link.groups(default="")
        path = normpath(join(dirname(source), target)) if "://" not in target else ""
        if not path or path.startswith("..") or not (ROOT / path).exists():
            return link[0]
        if (ROOT / path).is_dir():
            return text
        where = path.removeprefix("docs/") if path.startswith("docs/") else f"{BESIDE}/{path}"
        up = "../" * here.count("/")
        return f"{picture}[{text}]({up}{where}{anchor})"

    return _LINK.sub(lead, markdown)


def _targets(page: str) -> list[str]:
    """The files of the repository that a page leads to."""
    links = _LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    return [normpath(join(dirname(page), link[2])) for link in links if "://" not in link[2]]
