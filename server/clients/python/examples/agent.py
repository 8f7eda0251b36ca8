"""An agent that tries five ways to begin and keeps the best, takes a tool call back, and moves to another server.

python agent.py http://127.0.0.1:8080 http://127.0.0.1:8081
"""

import json
import sys
import tempfile
from pathlib import Path

from tidegate import Tidegate

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["harbour", "lighthouse"]}},
            "required": ["place"],
        },
    },
}


def weather(place: str) -> str:
    """The tool itself."""
    return f"There is fog at the {place}."


def main(first_url: str, second_url: str) -> None:
    """Leads a conversation on the first server and reads it on the second."""
    first, second = Tidegate(first_url), Tidegate(second_url)
    session = first.create(messages=[{"role": "system", "content": "You are the keeper of a lighthouse."}], label="start")

    # Five answers at once, from five forks of the session. The one that the model finds most likely stays.
    best = session.best_of(5, "How was the night?", max_tokens=24, temperature=1.0)
    print("keeper:", best.text)

    # A name for this moment, then a tool call. Its arguments follow the schema, whatever the model is.
    session.tag("before-the-call")
    call = session.say("Look outside.", tools=[WEATHER], tool_choice="required", max_tokens=60).tool_calls[0]
    result = weather(**json.loads(call["function"]["arguments"]))
    session.append(messages=[{"role": "tool", "tool_call_id": call["id"], "content": result}])
    print("after the call:", session.text()[-60:])

    # The call was not needed: the conversation goes back, and the model has never seen it.
    session.rewind("before-the-call")
    answer = session.say("Never mind. Good night.", max_tokens=24, label="good night")
    print("keeper:", answer.text)

    # The conversation is a file. Another server with the same model continues it, without reading it again.
    with tempfile.TemporaryDirectory() as folder:
        session.save(Path(folder) / "night.tidegate")
        moved = second.load(Path(folder) / "night.tidegate")
    assert moved.text() == session.text()
    print("on the second server:", moved.text())


if __name__ == "__main__":
    main(*sys.argv[1:])
