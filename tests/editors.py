"""An editor, as far as a debugger hears of it: a client of DAP, with the standard library alone."""

from __future__ import annotations

import itertools
import json
import socket
from typing import Any


def port_of(text: str) -> int:
    """The port in what is to go into a launch.json."""
    wanted = json.loads(text[text.index("{\n") : text.index("\n}") + 2])
    assert (wanted["type"], wanted["request"]) == ("debugpy", "attach")
    assert wanted["connect"]["host"] == "127.0.0.1"
    port: int = wanted["connect"]["port"]
    return port


class EditorClient:
    """Attached to a rank at a port. Each read has a deadline."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._stream = self._socket.makefile("rb")
        self._numbers = itertools.count(1)
        self._events: list[dict[str, Any]] = []

    def attach(self) -> EditorClient:
        """Attach as VS Code does, up to where breakpoints are set."""
        self.ask("initialize", adapterID="debugpy", linesStartAt1=True, pathFormat="path")
        self._send("attach", {"justMyCode": False})
        self.event("initialized")
        return self

    def stop_at(self, path: str, *lines: int) -> None:
        """Set the breakpoints of a file."""
        wanted = [{"line": line} for line in lines]
        self.ask("setBreakpoints", source={"path": path}, breakpoints=wanted)

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """What a request gives."""
        number = self._send(command, arguments)
        while True:
            message = self._read()
            if message["type"] == "response" and message["request_seq"] == number:
                assert message["success"], message
                body: dict[str, Any] = message.get("body") or {}
                return body
            if message["type"] == "event":
                self._events.append(message)

    def event(self, name: str) -> dict[str, Any]:
        """The next event of that name, past others."""
        while True:
            message = self._events.pop(0) if self._events else self._read()
            if message.get("event") == name:
                body: dict[str, Any] = message.get("body") or {}
                return body

    def stopped(self) -> tuple[int, str, int]:
        """Where a thread stops next: the thread, its function and its line."""
        thread = self.event("stopped")["threadId"]
        frame = self.ask("stackTrace", threadId=thread)["stackFrames"][0]
        return thread, frame["name"], frame["line"]

    def value(self, thread: int, expression: str) -> str:
        """An expression in the innermost frame."""
        frame = self.ask("stackTrace", threadId=thread)["stackFrames"][0]["id"]
        answer = self.ask("evaluate", expression=expression, frameId=frame, context="watch")
        return str(answer["result"])

    def variables(self, thread: int) -> dict[str, str]:
        """The local variables of the innermost frame."""
        frame = self.ask("stackTrace", threadId=thread)["stackFrames"][0]["id"]
        scope = self.ask("scopes", frameId=frame)["scopes"][0]["variablesReference"]
        found = self.ask("variables", variablesReference=scope)["variables"]
        return {each["name"]: each["value"] for each in found}

    def close(self) -> None:
        """Be gone without a word, as an editor that was killed."""
        self._stream.close()
        self._socket.close()

    def _send(self, command: str, arguments: dict[str, Any]) -> int:
        number = next(self._numbers)
        message = {"seq": number, "type": "request", "command": command, "arguments": arguments}
        data = json.dumps(message).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n" % len(data) + data)
        return number

    def _read(self) -> dict[str, Any]:
        size = 0
        while line := self._stream.readline().strip():
            size = int(line.split(b":")[1])
        if not size:
            raise EOFError("the rank has closed the connection")
        message: dict[str, Any] = json.loads(self._stream.read(size))
        return message
