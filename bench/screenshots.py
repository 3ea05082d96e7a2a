"""Takes pictures of the page of a running server, in both themes and three widths.

    python -m r3lite.serve --preset tiny --adapters base,sft=OUTPUT/sft --index OUTPUT/index &
    python -m bench.screenshots --output docs/images

The page is asked a test question of the sample world. Needs Chromium on the PATH. Also prints the time of the first
paint, and checks that the page loads nothing from other addresses.
"""

import argparse
from pathlib import Path

from bench.browser import Browser, chromium

SIZES = {  # name -> (width, height) in pixels
    "wide": (1280, 860),
    "tablet": (768, 900),
    "phone": (390, 844),
}
ANSWER_SECONDS = 120  # the longest wait for an answer
QUESTION = "Which company does the founder of Dansti House work for?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/")
    parser.add_argument("--output", default="docs/images", help="folder")
    parser.add_argument("--question", default=QUESTION)
    flags = parser.parse_args()
    output = Path(flags.output)
    chromium_path = chromium()
    assert chromium_path, "needs a Chromium on the PATH"
    output.mkdir(parents=True, exist_ok=True)
    with Browser(chromium_path) as browser:
        for dark in (False, True):
            for name, (width, height) in SIZES.items():
                theme = "dark" if dark else "light"
                browser.view(width, height, dark)
                browser.open(flags.url)
                browser.wait("document.querySelectorAll('#adapter option').length > 1")
                # Chooses the mode with search, and puts the cursor into the field of the query.
                browser.run("document.querySelector('[name=mode][value=search]').click(); $('query').focus()")
                browser.type(flags.question)
                browser.press("Enter")
                browser.wait("document.querySelector('.answer .sources')", ANSWER_SECONDS)
                browser.run("scrollTo(0, 0)")
                browser.picture(output / f"page-{theme}-{name}.png")
                paint = browser.run("performance.getEntriesByType('paint')[0].startTime")
                print(f"{theme} {name}: first paint after {paint} ms")
        assert all(url.startswith((flags.url, "data:", "about:")) for url in browser.requests), browser.requests


if __name__ == "__main__":
    main()
