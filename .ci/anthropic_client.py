"""The official `anthropic` package against a running server: messages whole and streamed, counted and refused.

    python .ci/anthropic_client.py http://127.0.0.1:8080
"""

import sys

import anthropic


def main(url: str) -> None:
    """Runs all, prints a line."""
    client = anthropic.Anthropic(base_url=url, api_key="none", timeout=120, max_retries=0)
    asked = {
        "model": client.models.list().data[0].id,
        "system": "You tell tales.",
        "messages": [{"role": "user", "content": "Tell me of a fox."}],
    }
    # The package leaves sampling to the body.
    sampled = {**asked, "max_tokens": 24, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**sampled)
    assert whole.role == "assistant" and whole.content[0].text.strip(), whole
    assert whole.stop_reason in ("end_turn", "max_tokens"), whole
    counted = client.messages.count_tokens(**asked).input_tokens
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
    print(f"anthropic {anthropic.__version__}: messages, whole and streamed alike, counted, stopped and refused")


if __name__ == "__main__":
    main(sys.argv[1])
