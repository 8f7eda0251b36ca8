"""The official `anthropic` package against a running server: messages with and without streaming, token counts, and errors.

    python .ci/anthropic_client.py http://127.0.0.1:8080
"""

import sys

import anthropic


def main(url: str) -> None:
    """Runs all checks and prints a line."""
    client = anthropic.Anthropic(base_url=url, api_key="none", timeout=120, max_retries=0)
    request = {
        "model": client.models.list().data[0].id,
        "system": "You tell tales.",
        "messages": [{"role": "user", "content": "Tell me of a fox."}],
    }
    # The package has no parameter for the temperature.
    sampled = {**request, "max_tokens": 24, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**sampled)
    assert whole.role == "assistant" and whole.content[0].text.strip(), whole
    assert whole.stop_reason in ("end_turn", "max_tokens"), whole
    counted = client.messages.count_tokens(**request).input_tokens
    assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens, (counted, whole.usage)

    with client.messages.stream(**sampled) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text, text
    assert final.usage.output_tokens == whole.usage.output_tokens, final.usage
    word = text.split()[1]
    stopped = client.messages.create(stop_sequences=[word], **sampled)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word), stopped
    try:
        client.messages.create(**{**sampled, "extra_body": {"temperature": 7}})
    except anthropic.BadRequestError as error:
        assert error.body["error"]["type"] == "invalid_request_error" and "temperature" in str(error), error.body
    else:
        raise AssertionError("temperature 7 was accepted")
    print(f"anthropic {anthropic.__version__}: messages, the same with and without streaming; token counts, stop sequences, errors")


if __name__ == "__main__":
    main(sys.argv[1])
