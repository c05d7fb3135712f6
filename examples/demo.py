"""What `make demo` runs: start a server on the embedded model, make a picture over HTTP, stop the server.

python examples/demo.py [FILE]
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from openai_image import make_picture

START_S = 300  # a first start on a slow disk spends most of it in imports
STOP_S = 60


def wait_for(what: str, server: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
    """The first group of `pattern` in the server's log, as soon as it is there."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if found := re.search(pattern, log.read_text(encoding="utf-8", errors="replace")):
            return found[1]
        if server.poll() is not None:
            break
        time.sleep(0.1)
    raise SystemExit(f"the server did not get to {what}; its log, {log}, says:\n{log.read_text(errors='replace')}")


def wait_until_healthy(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:  # 503 while the model loads, or no answer in time
            time.sleep(0.2)
    raise SystemExit(f"the server did not become ready; its log, {log}, says:\n{log.read_text(errors='replace')}")


def main() -> int:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "out/demo.png")
    out.parent.mkdir(parents=True, exist_ok=True)
    log = out.with_suffix(".log")
    command = [str(Path(sys.executable).with_name("polymux")), "serve", "demo", "--port", "0", "--num-threads", "1"]
    with log.open("wb") as sink, subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT) as server:
        try:
            url = wait_for("listening", server, log, r"Listening on (http://\S+)")
            wait_until_healthy(server, url, log)
            print(make_picture(f"{url}/v1", "a large red circle in the center on a white background", out))
        finally:
            server.terminate()
            try:
                code = server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                raise
    if code != 0:
        print(f"the server ended with exit code {code}; see {log}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
