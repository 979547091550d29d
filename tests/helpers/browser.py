"""Headless Chromium for tests of pages: found once, started per test with a profile of its own, no network of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
          "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
          "--disable-dev-shm-usage", "--force-prefers-reduced-motion", "--force-color-profile=srgb",
          "--window-size=1200,860")


def _find(*names: str) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


@contextlib.contextmanager
def chromium(*, dark: bool = False, mobile: bool = False) -> Iterator[Any]:
    """A selenium driver; skips where Chromium is absent. Nothing moves on its own, so a click hits what was seen.
    `mobile`: 390 by 800 points."""
    browser, driver = _find("chromium", "chromium-browser", "google-chrome"), _find("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no Chromium here: apt-get install chromium chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (group test)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = browser
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        # It begins with an empty page: its own first page may log that the machine is slow.
        options.add_experimental_option("prefs", {"session": {"restore_on_startup": 4, "startup_urls": ["about:blank"]}})
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(driver, env={**os.environ, "SE_OFFLINE": "true"})
        session = webdriver.Chrome(options=options, service=service)
        try:
            session.execute_cdp_cmd("Emulation.setEmulatedMedia",
                                    {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]})
            if mobile:
                session.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                        {"width": 390, "height": 800, "deviceScaleFactor": 2, "mobile": True})
            yield session
        finally:
            session.quit()
