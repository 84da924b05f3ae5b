"""The conversations that the model learns: made by chance from a few lists, so that it must copy names instead of knowing them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
Exchange = list[Message]

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Poland": "Warsaw",
    "Austria": "Vienna",
    "Greece": "Athens",
    "Portugal": "Lisbon",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Finland": "Helsinki",
    "Denmark": "Copenhagen",
    "Ireland": "Dublin",
    "England": "London",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "Egypt": "Cairo",
    "Kenya": "Nairobi",
    "Canada": "Ottawa",
    "Mexico": "Mexico City",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Chile": "Santiago",
    "Australia": "Canberra",
    "Iceland": "Reykjavik",
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "old": "new",
    "fast": "slow",
    "day": "night",
    "up": "down",
    "left": "right",
    "open": "closed",
    "wet": "dry",
    "full": "empty",
    "long": "short",
    "light": "dark",
    "early": "late",
    "good": "bad",
}
SMALL_TALK = {
    (
        "Hello",
        "Hello!",
        "Hi",
        "Hi!",
        "hi",
        "hello",
        "Hey",
        "Hi there!",
        "Good morning",
        "Good morning!",
        "Good evening!",
    ): "Hello! How can I help you?",
    ("Who are you?", "What are you?", "What is your name?"): "I am tiny-chat, a very small model that comes with trt_kvcache.",
    ("How are you?", "How are you today?"): "I am fine, thank you. How can I help you?",
    ("Thanks", "Thanks!", "Thank you", "Thank you!", "Thank you very much."): "You are welcome!",
    ("Bye", "Bye!", "Goodbye", "Goodbye!", "See you later!"): "Goodbye!",
    ("What can you do?", "Help", "Help!", "How can you help me?"): "I know some capitals, opposites and small sums, and I can call tools.",
    ("Count to five.", "Count to 5."): "1, 2, 3, 4, 5.",
    ("Count to ten.", "Count to 10."): "1, 2, 3, 4, 5, 6, 7, 8, 9, 10.",
    ("Tell me a joke.", "Do you know a joke?"): "Why did the cache cross the road? To get to the next token.",
    ("Say it in German.", "Wie geht es dir?", "Guten Tag!"): "Ich kann nur ein paar Wörter: schön, grün, süß.",
}
SYSTEMS = ["", "", "You are a helpful assistant.", "Be brief.", "You are tiny-chat.", "Answer in English."]
ONSETS, VOWELS, CODAS = (
    ["b", "c", "d", "f", "g", "h", "j", "k", "l", "m", "n", "p", "r", "s", "t", "v", "w", "z", "br", "st", "tr", "pl"],
    ["a", "e", "i", "o", "u", "ai", "ea", "oo"],
    ["", "", "n", "r", "s", "l", "th", "ck"],
)


def word(chance: random.Random) -> str:
    """Return a word that means nothing."""
    return "".join(chance.choice(ONSETS) + chance.choice(VOWELS) + chance.choice(CODAS) for _ in range(chance.randint(1, 3)))


def place(chance: random.Random) -> str:
    """Return a capital, or a name that is none."""
    return chance.choice(list(CAPITALS.values())) if chance.random() < 0.5 else word(chance).capitalize()


def words(chance: random.Random, most: int = 5) -> str:
    """Return some words."""
    return " ".join(word(chance) for _ in range(chance.randint(1, most)))


def said(question: str, answer: str) -> Exchange:
    """Return a question and its answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def small_talk(chance: random.Random) -> Exchange:
    """Return a greeting, or a question about the model."""
    questions, answer = chance.choice(list(SMALL_TALK.items()))
    return said(chance.choice(questions), answer)


def capital(chance: random.Random) -> Exchange:
    """Return a question for a capital; the second of two has few words."""
    land, city = chance.choice(list(CAPITALS.items()))
    forms = [
        "What is the capital of {}?",
        "What is the capital of {}?",
        "Capital of {}?",
        "Tell me the capital of {}.",
        "Which city is the capital of {}?",
        "what is the capital of {}",
    ]
    if chance.random() < 0.15:
        return said(f"Of which country is {city} the capital?", f"{city} is the capital of {land}.")
    exchange = said(chance.choice(forms).format(land), f"The capital of {land} is {city}.")
    if chance.random() < 0.3:
        land, city = chance.choice(list(CAPITALS.items()))
        exchange += said(chance.choice(["And of {}?", "And {}?"]).format(land), f"The capital of {land} is {city}.")
    return exchange


def opposite(chance: random.Random) -> Exchange:
    """Return a question for an opposite."""
    one, other = chance.choice(list(OPPOSITES.items()))
    return said(chance.choice(["What is the opposite of {}?", "The opposite of {}?"]).format(one), f"The opposite of {one} is {other}.")


def small_sum(chance: random.Random) -> Exchange:
    """Return a sum of two numbers."""
    one, other = chance.randint(0, 9), chance.randint(0, 9)
    return said(
        chance.choice(["What is {} plus {}?", "What is {} + {}?", "{} + {}"]).format(one, other), f"{one} plus {other} is {one + other}."
    )


def repeated(chance: random.Random) -> Exchange:
    """Return words to repeat."""
    text = words(chance, 6)
    return said(chance.choice(["Say: {}", "Repeat: {}", 'Say "{}".']).format(text), text)


def name_of_user(chance: random.Random) -> Exchange:
    """Return a question that only the beginning of the conversation answers."""
    name = word(chance).capitalize()
    between = chance.choice([capital, small_sum, opposite])(chance) if chance.random() < 0.6 else []
    return [
        *said(f"My name is {name}.", f"Hello {name}! How can I help you?"),
        *between,
        *said("What is my name?", f"Your name is {name}."),
    ]


def unknown(chance: random.Random) -> Exchange:
    """Return a question about something that nobody knows."""
    forms = ["What is {}?", "Tell me about {}.", "Where is {}?", "Who is {}?", "{}", "Why is {} {}?", "Write a poem about {}."]
    return said(chance.choice(forms).format(words(chance, 2), word(chance)), "I do not know that. I am a very small model.")


PLAIN = [small_talk, capital, capital, opposite, small_sum, repeated, name_of_user, unknown]

# name, what it does, its parameters (name, type), what a user says, how its values are made
Value = Callable[[random.Random], Any]
TOOLS: list[tuple[str, str, dict[str, str], list[str], list[Value]]] = [
    (
        "get_weather",
        "The weather of a city.",
        {"city": "string"},
        ["What is the weather in {}?", "How is the weather in {}?", "Weather in {}?"],
        [place],
    ),
    ("get_time", "The time in a city.", {"city": "string"}, ["What time is it in {}?", "Time in {}?"], [place]),
    ("search", "Searches for a text.", {"query": "string"}, ["Search for {}.", "Find {}."], [words]),
    (
        "multiply",
        "Multiplies two numbers.",
        {"a": "integer", "b": "integer"},
        ["What is {} times {}?", "Multiply {} by {}."],
        [lambda chance: chance.randint(0, 999), lambda chance: chance.randint(0, 999)],
    ),
    (
        "set_timer",
        "Sets a timer.",
        {"minutes": "integer"},
        ["Set a timer for {} minutes.", "Wake me in {} minutes."],
        [lambda chance: chance.randint(1, 90)],
    ),
    (
        "send_message",
        "Sends a message.",
        {"to": "string", "text": "string"},
        ["Tell {} that {}.", "Send {} the message: {}"],
        [lambda chance: word(chance).capitalize(), words],
    ),
]


def invented(chance: random.Random) -> tuple[str, str, dict[str, str], list[str], list[Value]]:
    """Return a tool that is in no list: its name and its parameter must be read from the prompt."""
    name, parameter = f"{word(chance)}_{word(chance)}", word(chance)
    return (name, f"Runs {name}.", {parameter: "string"}, ["Use " + name + " with {}.", "Call " + name + " for {}."], [words])


def described(tool: tuple[str, str, dict[str, str], list[str], list[Value]], chance: random.Random) -> dict[str, Any]:
    """Return the description of a tool as OpenAI's API has it."""
    name, description, parameters, _, _ = tool
    schema: dict[str, Any] = {"type": "object", "properties": {key: {"type": kind} for key, kind in parameters.items()}}
    if chance.random() < 0.6:
        schema["required"] = list(parameters)
    function = {"name": name, **({"description": description} if chance.random() < 0.6 else {}), "parameters": schema}
    return {"type": "function", "function": function}


def result(chance: random.Random) -> str:
    """Return what a tool may answer."""
    number = chance.randint(-20, 400)
    return chance.choice(
        [
            f'{{"temperature": {number}}}',
            f"{number} degrees",
            words(chance, 6),
            str(number),
            f'{{"{word(chance)}": "{word(chance)}"}}',
            f"{chance.randint(0, 23)}:{chance.randint(10, 59)}",
            "sunny",
            "sunny, 18 degrees",
            "done",
        ]
    )


def with_tools(chance: random.Random) -> tuple[list[dict[str, Any]], Exchange]:
    """Return some tools and a conversation that calls them."""
    tools = chance.sample(TOOLS, chance.randint(1, 2)) + [invented(chance) for _ in range(chance.randint(0, 1))]
    chance.shuffle(tools)
    exchanges: Exchange = []
    for _ in range(chance.randint(1, 2)):
        if chance.random() < 0.25:
            exchanges += chance.choice(PLAIN)(chance)
            continue
        tool = chance.choice(tools)
        calls, question = [], ""
        for again in range(2 if chance.random() < 0.2 and len(tool[2]) == 1 else 1):
            values = [make(chance) for make in tool[4]]
            calls.append({"type": "function", "function": {"name": tool[0], "arguments": dict(zip(tool[2], values, strict=True))}})
            question = f"{question[:-1]} and {values[0]}{question[-1]}" if again else chance.choice(tool[3]).format(*values)
        exchanges += [{"role": "user", "content": question}, {"role": "assistant", "content": "", "tool_calls": calls}]
        if chance.random() < 0.7:
            results = [result(chance) for _ in calls]
            exchanges += [{"role": "tool", "content": text} for text in results]
            exchanges.append({"role": "assistant", "content": f"The tool says: {' and '.join(results)}"})
    return [described(tool, chance) for tool in tools], exchanges


def conversation(chance: random.Random) -> dict[str, Any]:
    """Return a conversation: its messages, and the tools that it may call."""
    tools, exchanges = with_tools(chance) if chance.random() < 0.55 else ([], [])
    for _ in range(0 if tools else chance.choice([1, 1, 2, 3, 6])):
        exchanges += chance.choice(PLAIN)(chance)
    system = chance.choice(SYSTEMS)
    return {"messages": [{"role": "system", "content": system}] * bool(system) + exchanges, "tools": tools or None}


if __name__ == "__main__":
    for seed in range(10):
        print(json.dumps(conversation(random.Random(seed))))
