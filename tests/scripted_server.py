"""An HTTP server that says what a test tells it to."""

import contextlib
import json
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Scripted(ThreadingHTTPServer):
    """Says what it is told to, in order, the last again and again: a status, a body, seconds to wait before, and
    perhaps headers."""

    def __init__(self, *script):
        self.script, self.bodies, self.headers = list(script), [], []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                outer.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                outer.headers.append(dict(self.headers))
                self.reply()

            def do_GET(self):
                outer.bodies.append(self.path.encode())
                self.reply()

            def reply(self):
                status, body, wait, *headers = outer.script.pop(0) if len(outer.script) > 1 else outer.script[0]
                time.sleep(wait)
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {"content-length": str(len(data)), **(headers[0] if headers else {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(data)

            def log_message(self, *arguments):
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def json_bodies(self) -> list:
        """What was posted, as JSON."""
        return [json.loads(body) for body in self.bodies]
