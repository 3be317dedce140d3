"""Takes the pictures of docs/report.md: a plan in, PNGs of its report's sections out, by headless Chromium.

python tools/write_examples.py deepseek_v3
python tools/draw_report.py out/examples/deepseek_v3.yaml
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

from autoplan.plan import Plan
from autoplan.report.html import report_html

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
WIDTH = 1100
# picture: what stays on the page
PICTURES = {
    "time": "header, #time h2, #time .frame",
    "timeline": "#timeline h2, #timeline .legend, #timeline .zoom",
    "memory": "#memory h2, #memory .frame",
    "cluster": "#cluster",
}
CHROMIUM = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path, metavar="plan.yaml")
    parser.add_argument("--out", type=Path, default=IMAGES)
    args = parser.parse_args()
    text = report_html(Plan.load(args.plan))
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, shown in PICTURES.items():
            draw(only(text, shown), args.out / f"report-{name}.png", Path(folder))
    return 0


def only(text: str, shown: str) -> str:
    """The page with one piece of it in sight, which tells its height."""
    keep = f"document.body.replaceChildren(...document.querySelectorAll({shown!r}));"
    told = "document.body.dataset.high = Math.ceil(document.documentElement.getBoundingClientRect().height);"
    look = "<style>.tools { display: none !important; } body { padding-bottom: 1rem; }</style>"
    return text.replace("</head>", f"{look}</head>").replace(
        "</body>", f"<script>{keep}{told}</script></body>"
    )


def draw(text: str, path: Path, folder: Path) -> None:
    """One PNG, as high as the page."""
    page = folder / "page.html"
    page.write_text(text, encoding="utf-8")
    options = (f"--user-data-dir={folder / 'profile'}", f"--window-size={WIDTH},400")
    shown = subprocess.run([*CHROMIUM, *options, "--dump-dom", page.as_uri()], capture_output=True, text=True)
    high = re.search(r'data-high="(\d+)"', shown.stdout)
    if high is None:
        raise SystemExit(f"chromium showed nothing of {path.name}: {shown.stderr[-300:]}")
    size = (f"--window-size={WIDTH},{int(high[1]) + 8}", f"--screenshot={path}")
    subprocess.run([*CHROMIUM, options[0], *size, page.as_uri()], capture_output=True, check=True)
    print(f"wrote {path}")


if __name__ == "__main__":
    raise SystemExit(main())
