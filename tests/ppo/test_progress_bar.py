"""What is shown of a run, on a terminal and elsewhere."""

import io
import math

from rich.console import Console

from ppo.commands.progress_bar import ProgressBar


def shown(is_terminal: bool) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=is_terminal, width=120)
    with ProgressBar(console, total_steps=4096) as bar:
        bar.show(1024, 900.0, math.nan)
        bar.show(2048, 1234.5, 21.25)
        bar.show(4096, 2345.6, 33.75, lost_steps=1234)
    return stream.getvalue()


def test_a_terminal_shows_a_bar_with_steps_speed_and_return() -> None:
    text = shown(is_terminal=True)
    assert "4,096/4,096 steps" in text
    assert "2,346 steps/s" in text
    assert "return 33.8, 1,234 lost" in text


def test_elsewhere_there_is_a_line_at_first_and_at_the_end() -> None:
    assert shown(is_terminal=False).splitlines() == [
        "1,024/4,096 steps, 900 steps/s, return -",
        "4,096/4,096 steps, 2,346 steps/s, return 33.8, 1,234 lost",
    ]
