"""Create docs/images/demo.png and demo.gif from the page of `envserve demo`.

The agent learns, a worker is killed, and the network is cut. Requires the extras
browser and demo, and Chromium (/usr/bin/chromium, or the path in CHROMIUM).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from envserve.python_process import main_command

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH, HEIGHT = 1280, 960
GIF_SIZE = 800, 600
FRAME_MILLISECONDS = 200.0
NUM_COLORS = 64


@contextlib.contextmanager
def running_demo(*options: str) -> Iterator[str]:
    """Run a demo; yield the URL of its page."""
    command = main_command("envserve.__main__", "demo", "--no-open", "--port", "0")
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        try:
            yield re.findall(r"http://\S+", demo.stdout.readline())[0]
        finally:
            demo.send_signal(signal.SIGINT)
            demo.wait(30)


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """Run Chromium; yield an empty page."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"),
            args=["--no-sandbox"],
        )
        size = {"width": WIDTH, "height": HEIGHT}
        with chromium.new_context(viewport=size) as context:
            yield context.new_page()


class Film:
    """Screenshots of a page, each with its duration in milliseconds."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.frames: list[Image.Image] = []
        self.durations: list[int] = []

    def shoot(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (begin := time.monotonic()) < end:
            shot = Image.open(io.BytesIO(self.page.screenshot()))
            self.frames.append(shot.convert("RGB").resize(GIF_SIZE))
            taken = 1000 * (time.monotonic() - begin)
            self.page.wait_for_timeout(max(1.0, FRAME_MILLISECONDS - taken))
            self.durations.append(round(1000 * (time.monotonic() - begin)))

    def save(self, path: Path) -> None:
        palette = self.frames[-1].quantize(NUM_COLORS)
        first, *others = (
            frame.quantize(palette=palette, dither=Image.Dither.NONE)
            for frame in self.frames
        )
        first.save(
            path,
            save_all=True,
            append_images=others,
            duration=self.durations,
            loop=0,
        )


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name).click(no_wait_after=True)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with browser() as page, running_demo("--num-envs", "16") as url:
        page.goto(url)
        film = Film(page)
        film.shoot(6.0)
        press(page, "Kill a worker")
        film.shoot(1.5)
        press(page, "Cut the network")
        film.shoot(1.8)
        page.screenshot(path=FOLDER / "demo.png")
        film.shoot(2.5)
    film.save(FOLDER / "demo.gif")
    with Image.open(FOLDER / "demo.png") as shot:
        shot.convert("RGB").quantize(256).save(FOLDER / "demo.png", optimize=True)
    for path in FOLDER.glob("demo.*"):
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
