"""The official `openai` package against a server with API keys: which errors it raises without a key, with a wrong key,
without the scope, and over the rate limit.

    python .ci/openai_keys.py http://127.0.0.1:8080/v1

The server must have been started with `--api-keys-file .ci/keys.json`.
"""

import sys
import urllib.request

import openai


def main(base_url: str) -> None:
    """Runs all checks and prints a line."""

    def client(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=base_url, api_key=key, timeout=60, max_retries=0)

    for key in ("none", "ci-key-that-is-not-known"):
        try:
            client(key).models.list()
        except openai.AuthenticationError as error:
            assert error.code == "invalid_api_key" and error.response.headers["www-authenticate"], error.body
        else:
            raise AssertionError("a wrong key was accepted")
    model = client("ci-key-for-everything").models.list().data[0].id
    request = {"model": model, "prompt": "Once upon a time", "max_tokens": 2}
    client("ci-key-for-everything").completions.create(**request)
    try:
        client("ci-key-for-metrics").completions.create(**request)
    except openai.PermissionDeniedError as error:
        assert error.code == "insufficient_scope", error.body
    else:
        raise AssertionError("a key for metrics generated text")
    limited = client("ci-key-for-one-request")
    limited.completions.create(**request)
    try:
        limited.completions.create(**request)
    except openai.RateLimitError as error:
        assert error.code == "rate_limit_exceeded", error.body
        assert int(error.response.headers["retry-after"]) >= 1, error.response.headers
    else:
        raise AssertionError("a key for one request per minute made two")
    with urllib.request.urlopen(base_url.replace("/v1", "/health")) as answer:
        assert answer.status == 200
    print("openai: wrong keys, missing scopes and rate limits raise the package's errors")


if __name__ == "__main__":
    main(sys.argv[1])
