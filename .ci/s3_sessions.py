"""Sessions whose snapshots are in S3: turns, a restart of the server, the same text afterwards, and deletion.

    python .ci/s3_sessions.py target/debug/tidegate       (a program with the feature `s3`; `moto` is the S3 server)
"""

import json
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

import boto3
from moto.server import ThreadedMotoServer

BUCKET, FOLDER = "tidegate-ci", "some/folder"
PATIENCE_S = 120


class Tidegate:
    """A running server, with its snapshots in the bucket and its index in `data`."""

    def __init__(self, program: str, data: pathlib.Path, endpoint: str):
        self.log = data.with_suffix(".log")
        aws = {
            "AWS_ENDPOINT": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "ci",
            "AWS_SECRET_ACCESS_KEY": "ci-secret",
            "AWS_REGION": "us-east-1",
        }
        flags = ["--device", "cpu", "--port", "0", "--data-dir", str(data), "--store", f"s3://{BUCKET}/{FOLDER}"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen([program, "serve", *flags], stderr=log, env={**os.environ, **aws})
        self.url = ""
        end = time.monotonic() + PATIENCE_S
        while not self.url:
            line = re.search(r"listening on (http://[0-9.:]+)", self.log.read_text())
            self.url = line.group(1) if line else ""
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                raise SystemExit(f"the server did not start:\n{self.log.read_text()}")
            time.sleep(0.05)

    def send(self, method: str, path: str, body: object = None) -> tuple[int, dict]:
        """Sends a request; returns the status and the JSON body of the answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")

    def create(self) -> str:
        status, session = self.send("POST", "/v1/sessions", {"text": "Once upon a time there was", "seed": 3})
        assert status == 201, session
        return session["id"]

    def turn(self, session: str, prompt: str) -> tuple[str, dict]:
        """Takes a turn; returns its text and what the answer says about the session."""
        body = {"session": session, "prompt": prompt, "max_tokens": 24, "temperature": 0.9, "seed": 7, "ignore_eos": True}
        status, answer = self.send("POST", "/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["text"], answer["session"]

    def stop(self) -> None:
        """Ends the server with SIGTERM; it must exit with 0."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE_S)
        assert code == 0, f"exit code {code}:\n{self.log.read_text()}"


def main() -> None:
    # Otherwise werkzeug logs a line for each request.
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    account = {"aws_access_key_id": "ci", "aws_secret_access_key": "ci-secret", "region_name": "us-east-1"}
    bucket = boto3.resource("s3", endpoint_url=endpoint, **account).create_bucket(Bucket=BUCKET)

    def stored() -> list[str]:
        return [item.key for item in bucket.objects.all()]

    with tempfile.TemporaryDirectory() as folder:
        data = pathlib.Path(folder) / "data"
        server = Tidegate(sys.argv[1], data, endpoint)
        try:
            through = server.create()
            expected = [server.turn(through, prompt)[0] for prompt in (" a fox", " and then")]
            session = server.create()
            first, about = server.turn(session, " a fox")
            keys = stored()
            assert keys and all(key.startswith(f"{FOLDER}/") for key in keys), keys
            server.stop()

            server = Tidegate(sys.argv[1], data, endpoint)
            second, after = server.turn(session, " and then")
            assert [first, second] == expected, (first, second, expected)
            assert after["tier"] == "disk" and after["recomputed_tokens"] == 0, after
            assert after["parent"] == about["version"], (about, after)

            for gone in (session, through):
                status, answer = server.send("DELETE", f"/v1/sessions/{gone}")
                assert status < 300, answer
                assert server.send("GET", f"/v1/sessions/{gone}")[0] == 404
            end = time.monotonic() + PATIENCE_S
            while stored():
                assert time.monotonic() < end, f"objects are left over: {stored()}"
                time.sleep(0.2)
            server.stop()
        finally:
            server.process.kill()
            moto.stop()
    print(f"S3: {len(keys)} snapshots, the same text after a restart, and no object left after deletion")


if __name__ == "__main__":
    main()
