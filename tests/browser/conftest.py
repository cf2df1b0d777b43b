"""A real browser: Chromium or Chrome where one is installed. CI sets BROWSER_TESTS=required, and then a missing one is a failure."""

import os
import shutil

import pytest
from playwright import sync_api

NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"]
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
QUIET = [
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
sync_api.expect.set_options(timeout=600_000)  # ms: what is expected comes on a busy machine, too


@pytest.fixture(scope="session")
def browser():
    found = next(filter(None, map(shutil.which, [*NAMES, MAC])), None)
    if not found:
        missing = "no Chromium or Chrome was found: install one (Debian: apt-get install chromium) to run the browser tests"
        pytest.fail(missing) if os.environ.get("BROWSER_TESTS") == "required" else pytest.skip(
            missing
        )
    with sync_api.sync_playwright() as playwright:
        # Only pages of this machine are opened, so the sandbox, which root and containers cannot have, is not missed.
        browser = playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-gpu", *QUIET]
        )
        yield browser
        browser.close()
