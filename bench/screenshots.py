"""Pictures of the server's page, in both themes and three widths, of a server that runs.

    python -m r3lite.serve --preset tiny --adapters base,sft=OUTPUT/sft --index OUTPUT/index &
    python -m bench.screenshots --output docs/images

Needs a Chromium. Asks a test question of the sample world.
"""

import argparse
from pathlib import Path

from bench.browser import Browser, chromium

SIZES = {"wide": (1280, 860), "tablet": (768, 900), "phone": (390, 844)}
QUESTION = "Which company does the founder of Dansti House work for?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/")
    parser.add_argument("--output", default="docs/images", help="folder")
    parser.add_argument("--question", default=QUESTION)
    given = parser.parse_args()
    out, path = Path(given.output), chromium()
    assert path, "needs a Chromium on the PATH"
    out.mkdir(parents=True, exist_ok=True)
    with Browser(path) as browser:
        for dark in (False, True):
            for name, (width, height) in SIZES.items():
                theme = "dark" if dark else "light"
                browser.view(width, height, dark)
                browser.open(given.url)
                browser.wait("document.querySelectorAll('#adapter option').length > 1")
                browser.run("document.querySelector('[name=mode][value=search]').click(); $('query').focus()")
                browser.type(given.question)
                browser.press("Enter")
                browser.wait("document.querySelector('.answer .sources')", 120)
                browser.run("scrollTo(0, 0)")
                browser.picture(out / f"page-{theme}-{name}.png")
                paint = browser.run("performance.getEntriesByType('paint')[0].startTime")
                print(f"{theme} {name}: first paint after {paint} ms")
        assert all(url.startswith((given.url, "data:", "about:")) for url in browser.requests), browser.requests


if __name__ == "__main__":
    main()
