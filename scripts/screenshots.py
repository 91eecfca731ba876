#!/usr/bin/env python3
"""Take the screenshots of docs/page.md from a server whose envs are being stepped.

Requires Chromium and the virtual environment that `make test-integration` creates; run
the script with .venv-integration/bin/python.
"""

from __future__ import annotations

import json
import signal
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

import numpy as np
from playwright.sync_api import Browser, sync_playwright

from envserve.client import BatchEnv
from envserve.demo.servers import DemoServer
from envserve.monitoring.page.serve import page_process

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
NUM_ENVS, SECONDS = 16, 25.0
SHOTS = {"desk": (1280, 800, "light"), "dark": (1280, 800, "dark")}
SHOTS |= {"phone": (390, 844, "light")}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "cartpole"
        run.mkdir()
        options = ["CartPole-v1", "--insecure-no-auth", "--workers", "4"]
        server = DemoServer(Path(folder) / "server", *options)
        address = f"tcp://127.0.0.1:{server.wait_until_ready()}"
        has_ended = threading.Event()
        stepper = threading.Thread(target=play, args=(address, run, has_ended))
        stepper.start()
        try:
            process, url = page_process([address], run, insecure=True)
            with process, sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path="/usr/bin/chromium", args=["--no-sandbox"]
                )
                take(browser, url, server)
                process.terminate()
        finally:
            has_ended.set()
            stepper.join()
            server.close()


def play(address: str, run: Path, has_ended: threading.Event) -> None:
    """Step CartPole with an improving policy, and write metrics as a trainer does."""
    generator = np.random.default_rng(0)
    returns: deque[float] = deque(maxlen=20)
    sums, steps, started = np.zeros(NUM_ENVS), 0, time.monotonic()
    with BatchEnv.connect("CartPole-v1", [address], NUM_ENVS, insecure=True) as env:
        observation = env.reset()
        while not has_ended.wait(0.01):
            skill = min(1.0, (time.monotonic() - started) / SECONDS)
            good = observation[:, 2] + 0.3 * observation[:, 3] > 0
            arbitrary = generator.random(NUM_ENVS) < 0.5
            actions = np.where(generator.random(NUM_ENVS) < skill, good, arbitrary)
            result = env.step(actions.astype(np.int64))
            observation, sums = result.observation, sums + result.reward
            steps += NUM_ENVS
            ended = result.terminated | result.truncated
            returns.extend(sums[ended])
            sums[ended] = 0.0
            if ended.any():
                row = {"steps": steps, "mean_return": float(np.mean(returns))}
                with (run / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")


def take(browser: Browser, url: str, server: DemoServer) -> None:
    """Open the page for a while, kill a worker, and save screenshots."""
    pages = {}
    for name, (width, height, scheme) in SHOTS.items():
        size = {"width": width, "height": height}
        page = browser.new_page(viewport=size, color_scheme=scheme)
        page.goto(url)
        pages[name] = page
    pages["desk"].wait_for_timeout(1000 * SECONDS)
    server.signal_worker(signal.SIGKILL)
    pages["desk"].locator(".badge", has_text="back in").first.wait_for()
    pages["desk"].wait_for_timeout(500)
    IMAGES.mkdir(exist_ok=True)
    for name, page in pages.items():
        page.screenshot(path=IMAGES / f"page-{name}.png")
    pages["desk"].locator(".tile").nth(5).click()
    pages["desk"].wait_for_timeout(3000)
    pages["desk"].screenshot(path=IMAGES / "page-env.png")


if __name__ == "__main__":
    main()
