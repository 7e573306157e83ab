"""Takes the pictures of the documentation from a real run: the terminal, the run's page and TensorBoard.

    python docs/pictures.py           # a minute; needs Chromium

The run is that of the first page, on the bundled digits. Each picture is taken light and dark, as PNG in
docs/pictures/.
"""

import html
import io
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from urllib.parse import quote
from urllib.request import urlopen

from PIL import Image

__all__ = ["COMMAND", "FOLDER", "last_words", "main"]

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pictures"
COMMAND = "python -m recipes.mnist --dataset digits --name first"
COLUMNS = 116
ROW = f".{{1,{COLUMNS}}}"
_COLORS = 96
_SCHEMES = {"light": ("#ffffff", "#24292f", 1), "dark": ("#0d1117", "#e6edf3", 0)}
"""Background and text of the terminal, and Chromium's number of the color scheme."""


def last_words(output: str) -> str:
    """Return what a terminal shows after some output: of each line what was written last over its beginning.

    Example:
        >>> last_words("a\\r\\nepoch 1\\repoch 2\\x1b[K\\r\\n\\x1b[1mdone\\x1b[0m\\r\\n")
        'a\\nepoch 2\\ndone\\n'
    """
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).replace("\r\n", "\n")
    return "".join(line.rsplit("\r", 1)[-1] for line in plain.splitlines(keepends=True))


def _run_in_terminal(folder: Path) -> str:
    """Run the command in a terminal, and return its output."""
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (40, COLUMNS))
    env = os.environ | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, *COMMAND.split()[1:], "--threads", "1"]
    process = subprocess.Popen(words, stdin=child, stdout=child, stderr=child, cwd=folder, env=env)
    os.close(child)
    output = b""
    while True:
        try:
            part = os.read(parent, 65_536)
        except OSError:  # Linux's word for the end of a terminal.
            break
        if not part:
            break
        output += part
    os.close(parent)
    if process.wait():
        raise RuntimeError(f"{COMMAND} ended with {process.returncode}:\n{output.decode(errors='replace')[-2_000:]}")
    return output.decode()


def _shoot(browser: str, url: str, path: Path, scheme: int, size: tuple[int, int]) -> None:
    """Save what the browser shows of a page as a PNG with few colors."""
    with tempfile.TemporaryDirectory() as profile:
        shot = Path(profile) / "shot.png"
        flags = ["--headless=new", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={profile}"]
        # Without WebGL, by which TensorBoard draws in a thread that no virtual time waits for.
        flags += ["--disable-gpu", "--disable-3d-apis"]
        flags += [f"--blink-settings=preferredColorScheme={scheme}", "--virtual-time-budget=60000"]
        flags += ["--window-size={},{}".format(*size), f"--screenshot={shot}", url]
        subprocess.run([browser, *flags], check=True, capture_output=True, timeout=600)
        image = Image.open(io.BytesIO(shot.read_bytes())).convert("RGB")
    image.quantize(_COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


def _tensorboard(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start TensorBoard on a free port, and return its address once it answers."""
    words = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", "0", "--load_fast", "false"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:
        address = re.search(r"http://\S+?:\d+/", line.decode(errors="replace"))
        if address:
            urlopen(address[0], timeout=120).close()
            time.sleep(10)  # It reads the folder every few seconds.
            return process, address[0]
    raise RuntimeError("TensorBoard has ended")


def main() -> None:
    """Run the command, and take all pictures."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("no browser: install Chromium, as with apt-get install chromium")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = f"$ {COMMAND}\n{last_words(_run_in_terminal(folder))}"
        board, address = _tensorboard(folder / "runs")
        try:
            for scheme, (background, color, number) in _SCHEMES.items():
                page = folder / "terminal.html"
                style = f"margin:0;padding:16px;background:{background};color:{color};font:14px/20px monospace"
                wrapped = [part for line in text.splitlines() for part in re.findall(ROW, line) or [""]]
                page.write_text(
                    f'<meta charset="utf-8"><body style="margin:0;background:{background}">'
                    f'<pre style="{style}">{html.escape(chr(10).join(wrapped))}</pre>'
                )
                _shoot(
                    browser, page.as_uri(), FOLDER / f"terminal-{scheme}.png", number, (1_000, 20 * len(wrapped) + 32)
                )
                report = folder / "runs" / "mnist" / "first" / "report.html"
                _shoot(browser, report.as_uri(), FOLDER / f"report-{scheme}.png", number, (1_300, 1_420))
                shown = quote("^(train|val)/(accuracy|loss)$")
                query = f"?darkMode={str(scheme == 'dark').lower()}&tagFilter={shown}#timeseries"
                _shoot(browser, address + query, FOLDER / f"tensorboard-{scheme}.png", number, (1_300, 900))
        finally:
            board.terminate()
            board.wait()


if __name__ == "__main__":
    main()
