"""LangChain's `langchain-openai` against a running server: chat and completions, with and without streaming, and in batches.

    python .ci/langchain_client.py http://127.0.0.1:8080/v1
"""

import sys
from importlib.metadata import version

import openai
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI


def main(base_url: str) -> None:
    """Runs all checks and prints a line for each."""
    served = openai.OpenAI(base_url=base_url, api_key="none")
    model = served.models.list().data[0].id
    options = {"base_url": base_url, "api_key": "none", "model": model, "temperature": 0, "max_retries": 0, "timeout": 120}

    chat = ChatOpenAI(max_tokens=24, stream_usage=True, **options)
    whole = chat.invoke([("system", "You tell tales."), ("human", "Tell me of a fox.")])
    assert whole.content.strip(), whole
    assert whole.response_metadata["finish_reason"] in ("length", "stop"), whole
    assert whole.usage_metadata["total_tokens"] > whole.usage_metadata["output_tokens"] > 0, whole
    chunks = list(chat.stream([("system", "You tell tales."), ("human", "Tell me of a fox.")]))
    assert "".join(chunk.content for chunk in chunks) == whole.content, chunks
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usage[-1]["output_tokens"] == whole.usage_metadata["output_tokens"], usage

    chain = ChatPromptTemplate.from_messages([("human", "Tell me of a {animal}.")]) | chat
    answers = chain.batch([{"animal": animal} for animal in ("fox", "crow", "hare")])
    assert len({answer.content for answer in answers}) == 3, answers
    assert chain.invoke({"animal": "crow"}).content == answers[1].content
    try:
        chat.bind(top_p=7).invoke("x")
    except openai.BadRequestError as error:
        assert error.param == "top_p", error.body
    else:
        raise AssertionError("top_p 7 was accepted")
    print(f"langchain-openai {version('langchain-openai')}: ChatOpenAI invoked, streamed, in a chain and in a batch")

    shape = {
        "title": "animal",
        "type": "object",
        "properties": {"size": {"enum": ["small", "large"]}},
        "required": ["size"],
        "additionalProperties": False,
    }
    for method in ("json_schema", "function_calling"):
        structured = ChatOpenAI(max_tokens=200, **options).with_structured_output(shape, method=method)
        assert structured.invoke("How large is a fox?")["size"] in ("small", "large"), method
    print("langchain-openai: structured output, by schemas and by tools")

    complete = OpenAI(max_tokens=24, **options)
    text = complete.invoke("Once upon a time")
    assert text.strip() and "".join(complete.stream("Once upon a time")) == text, text
    assert complete.generate(["Once upon a time", "The old house"]).generations[0][0].text == text
    print("langchain-openai: OpenAI invoked, streamed and for two prompts at once")


if __name__ == "__main__":
    main(sys.argv[1])
