"""A real Chromium without a display, driven by its DevTools protocol through pipes: each message ends with a zero."""

import json
import os
import subprocess
from itertools import count

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


PHONE_WIDTH = 480
"""From this width on down the screen is a phone's."""
WATCH = """window.alert = (text) => console.error(`alert: ${text}`);
document.addEventListener("securitypolicyviolation", (event) => console.error(`policy: ${event.violatedDirective}`));"""
"""Runs before the scripts of each page."""


NAVIGATED = "Inspected target navigated or closed"
"""The browser's error of a command whose page was replaced by another before it had answered."""


class NavigatedError(Exception):
    """The page was replaced by another before a command had answered."""


class Browser:
    """A browser with one page, from `with` on."""

    def __init__(self, profile):
        self._profile, self._numbers, self._rest, self._session = profile, count(1), b"", None
        self._errors = []

    def __enter__(self):
        read_end, self._commands = os.pipe()
        self._answers, write_end = os.pipe()
        words = ["chromium", *FLAGS, f"--user-data-dir={self._profile}", "--remote-debugging-pipe"]
        script = f'exec "$@" 3<&{read_end} 4>&{write_end}'
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *words], pass_fds=(read_end, write_end), stdout=null, stderr=null
        )
        os.close(read_end)
        os.close(write_end)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Accessibility", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        return self

    def __exit__(self, *error):
        self._process.kill()
        self._process.wait(timeout=300)
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method, **parameters):
        """The answer to a command; of the events in between those with errors are kept."""
        message = {"id": next(self._numbers), "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                data = os.read(self._answers, 2**16)
                assert data, "the browser has ended"
                self._rest += data
            one, _, self._rest = self._rest.partition(b"\0")
            if (answer := json.loads(one)).get("id") == message["id"]:
                if answer.get("error", {}).get("message") == NAVIGATED:
                    raise NavigatedError
                assert "error" not in answer, answer
                return answer["result"]
            self._errors += error_texts(answer)

    def errors(self):
        """The texts of all errors so far: those that scripts throw or log, promises that are rejected, what the page's
        policy forbids, what can't be loaded, dialogs."""
        self.evaluate("new Promise((done) => setTimeout(done))")
        return [*self._errors]

    def resize(self, width, height):
        """Gives the page a screen of this size in CSS pixels."""
        is_phone = width <= PHONE_WIDTH
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def emulate_colours(self, scheme):
        """Makes the system's colours "light" or "dark"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def evaluate(self, expression):
        """The value of a JavaScript expression, awaited if it is a promise; of the new page if it reloads meanwhile."""
        try:
            found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        except NavigatedError:
            return self.evaluate(expression)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def names(self):
        """The accessibility tree: the names of what it shows, by role."""
        found = {}
        for node in self.call("Accessibility.getFullAXTree")["nodes"]:
            if not node.get("ignored"):
                found.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
        return found

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode={"Tab": 9}[key])


def error_texts(event):
    """The text of an event of the browser that is an error, in a list; [] of another one."""
    found = event.get("params", {})
    match event.get("method"):
        case "Runtime.exceptionThrown":
            details = found["exceptionDetails"]
            return [f"{details['text']} {details.get('exception', {}).get('description', '')}".strip()]
        case "Runtime.consoleAPICalled" if found["type"] in ("error", "assert"):
            return [" ".join(str(each.get("value", each.get("description"))) for each in found["args"])]
        case "Log.entryAdded" if found["entry"]["level"] == "error":
            return [found["entry"]["text"]]
    return []
