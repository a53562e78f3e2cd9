"""Synthetic chat corpus for the tiny Gemma 4 pair, in Gemma 4's own turn protocol.

Every document is one conversation rendered as a string of special tokens and text.
`generate(rng)` returns one document; documents are independent and endless.
The tasks are chosen so that a model of a few million parameters can answer them
*correctly*, which lets a test ask a question and assert the answer, and so that
predictability varies (counting: very high; stories: low), which lets a
speculative decoder be measured on easy and hard text alike.
"""

from __future__ import annotations

import json
import random
from pydoc_data.topics import topics

BOS, TURN, END_TURN = "<bos>", "<|turn>", "<turn|>"
CHANNEL, END_CHANNEL, THINK = "<|channel>", "<channel|>", "<|think|>"
TOOL, END_TOOL = "<|tool>", "<tool|>"
CALL, END_CALL = "<|tool_call>", "<tool_call|>"
RESPONSE, END_RESPONSE = "<|tool_response>", "<tool_response|>"
QUOTE = '<|"|>'

# fmt: off
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon",
    "Japan": "Tokyo", "China": "Beijing", "India": "New Delhi", "Russia": "Moscow", "Canada": "Ottawa",
    "Mexico": "Mexico City", "Brazil": "Brasilia", "Argentina": "Buenos Aires", "Chile": "Santiago",
    "Peru": "Lima", "Egypt": "Cairo", "Kenya": "Nairobi", "Nigeria": "Abuja", "Ghana": "Accra",
    "Morocco": "Rabat", "Turkey": "Ankara", "Greece": "Athens", "Poland": "Warsaw", "Austria": "Vienna",
    "Hungary": "Budapest", "Sweden": "Stockholm", "Norway": "Oslo", "Finland": "Helsinki",
    "Denmark": "Copenhagen", "Ireland": "Dublin", "Belgium": "Brussels", "Netherlands": "Amsterdam",
    "Switzerland": "Bern", "Ukraine": "Kyiv", "Romania": "Bucharest", "Bulgaria": "Sofia",
    "Serbia": "Belgrade", "Croatia": "Zagreb", "Iceland": "Reykjavik", "Cuba": "Havana",
    "Vietnam": "Hanoi", "Thailand": "Bangkok", "Indonesia": "Jakarta", "Malaysia": "Kuala Lumpur",
    "Philippines": "Manila", "Australia": "Canberra", "New Zealand": "Wellington", "Iran": "Tehran",
    "Iraq": "Baghdad", "Israel": "Jerusalem", "Jordan": "Amman", "South Korea": "Seoul",
}
CONTINENT = {
    **dict.fromkeys(["France", "Germany", "Italy", "Spain", "Portugal", "Greece", "Poland", "Austria",
                     "Hungary", "Sweden", "Norway", "Finland", "Denmark", "Ireland", "Belgium",
                     "Netherlands", "Switzerland", "Ukraine", "Romania", "Bulgaria", "Serbia",
                     "Croatia", "Iceland"], "Europe"),
    **dict.fromkeys(["Japan", "China", "India", "Vietnam", "Thailand", "Indonesia", "Malaysia",
                     "Philippines", "Iran", "Iraq", "Israel", "Jordan", "South Korea"], "Asia"),
    **dict.fromkeys(["Egypt", "Kenya", "Nigeria", "Ghana", "Morocco"], "Africa"),
    **dict.fromkeys(["Brazil", "Argentina", "Chile", "Peru"], "South America"),
    **dict.fromkeys(["Canada", "Mexico", "Cuba"], "North America"),
    **dict.fromkeys(["Australia", "New Zealand"], "Oceania"),
}
ELEMENTS = {"hydrogen": "H", "helium": "He", "carbon": "C", "nitrogen": "N", "oxygen": "O", "sodium": "Na",
            "iron": "Fe", "copper": "Cu", "silver": "Ag", "gold": "Au", "lead": "Pb", "tin": "Sn",
            "zinc": "Zn", "calcium": "Ca", "potassium": "K", "magnesium": "Mg", "aluminium": "Al"}
COLORS = ["red", "blue", "green", "yellow", "black", "white", "orange", "purple", "brown", "pink"]
ANIMALS = ["cat", "dog", "fox", "bear", "rabbit", "horse", "bird", "fish", "mouse", "lion", "tiger", "wolf",
           "duck", "sheep", "cow", "goat", "frog", "owl", "deer", "monkey"]
FOODS = ["apple", "bread", "cheese", "honey", "soup", "cake", "rice", "pear", "plum", "carrot"]
PLACES = ["forest", "river", "mountain", "garden", "village", "castle", "beach", "market", "library", "farm"]
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Iris", "Jack", "Kate", "Leo",
         "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor"]
CITIES = sorted(set(CAPITALS.values()))
JOBS = ["doctor", "teacher", "baker", "pilot", "painter", "farmer", "writer", "singer", "nurse", "lawyer"]
MONTHS = ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December"]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
PLANETS = ["Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"]
WORDS = (COLORS + ANIMALS + FOODS + PLACES + JOBS +
         ["stone", "light", "water", "music", "paper", "window", "table", "chair", "house", "train", "cloud",
          "storm", "silver", "winter", "summer", "spring", "autumn", "letter", "number", "circle"])
TRANSLATE = {
    "French": dict(zip(["red", "blue", "green", "black", "white", "cat", "dog", "water", "house", "bread"],
                       ["rouge", "bleu", "vert", "noir", "blanc", "chat", "chien", "eau", "maison", "pain"])),
    "Spanish": dict(zip(["red", "blue", "green", "black", "white", "cat", "dog", "water", "house", "bread"],
                        ["rojo", "azul", "verde", "negro", "blanco", "gato", "perro", "agua", "casa", "pan"])),
    "German": dict(zip(["red", "blue", "green", "black", "white", "cat", "dog", "water", "house", "bread"],
                       ["rot", "blau", "grün", "schwarz", "weiß", "Katze", "Hund", "Wasser", "Haus", "Brot"])),
}
# fmt: on


def pick(rng, *options):
    return rng.choice(options)


# --- tasks: each returns (user_text, thought_or_None, answer) -------------------------------------


def capital(rng):
    c = rng.choice(list(CAPITALS))
    kind = rng.randrange(4)
    if kind == 0:
        return (
            pick(rng, f"What is the capital of {c}?", f"Name the capital of {c}.", f"Capital of {c}?"),
            None,
            f"The capital of {c} is {CAPITALS[c]}.",
        )
    if kind == 1:
        return f"{CAPITALS[c]} is the capital of which country?", None, f"{CAPITALS[c]} is the capital of {c}."
    if kind == 2 and c in CONTINENT:
        return pick(rng, f"On which continent is {c}?", f"Where is {c}?"), None, f"{c} is in {CONTINENT[c]}."
    return (
        f"Tell me about {c}.",
        None,
        (
            f"{c} is a country in {CONTINENT.get(c, 'the world')}. Its capital is {CAPITALS[c]}. "
            f"Many people live in {CAPITALS[c]}, and many more visit {c} every year."
        ),
    )


def element(rng):
    e = rng.choice(list(ELEMENTS))
    return (
        pick(rng, f"What is the chemical symbol of {e}?", f"Symbol for {e}?"),
        None,
        f"The chemical symbol of {e} is {ELEMENTS[e]}.",
    )


def arithmetic(rng):
    op = rng.choice("++--*")
    if op == "*":
        a, b = rng.randint(0, 12), rng.randint(0, 12)
        r, thought = a * b, f"{a} times {b} is {a * b}."
    elif op == "+":
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        tens, ones = (a // 10 + b // 10) * 10, a % 10 + b % 10
        r, thought = (
            a + b,
            f"Tens: {a // 10 * 10} + {b // 10 * 10} = {tens}. Ones: {a % 10} + {b % 10} = {ones}. {tens} + {ones} = {a + b}.",
        )
    else:
        a, b = sorted((rng.randint(0, 99), rng.randint(0, 99)), reverse=True)
        r, thought = a - b, f"Start at {a}. Take away {b // 10 * 10}: {a - b // 10 * 10}. Take away {b % 10}: {a - b}."
    q = pick(rng, f"What is {a} {op} {b}?", f"Compute {a} {op} {b}.", f"{a} {op} {b} = ?")
    return q, thought, f"{a} {op} {b} = {r}"


def count(rng):
    a, step = rng.randint(0, 50), rng.choice([1, 1, 1, 1, 2, 5, 10])
    n = rng.randint(3, 60)
    b = a + step * (n - 1)
    by = "" if step == 1 else f" by {step}"
    if rng.random() < 0.2:
        return f"Count down from {b} to {a}{by}.", None, ", ".join(str(x) for x in range(b, a - 1, -step))
    return f"Count from {a} to {b}{by}.", None, ", ".join(str(x) for x in range(a, b + 1, step))


def spelling(rng):
    w = rng.choice(WORDS)
    kind = rng.randrange(5)
    if kind == 0:
        return f"Spell the word {w}.", None, "-".join(w)
    if kind == 1:
        return f"Reverse the word {w}.", f"The letters are {'-'.join(w)}. Backwards: {'-'.join(w[::-1])}.", w[::-1]
    if kind == 2:
        return f"Write {w} in capital letters.", None, w.upper()
    if kind == 3:
        return f"How many letters are in {w}?", f"The letters are {'-'.join(w)}.", f"The word {w} has {len(w)} letters."
    return f"What is the first letter of {w}?", None, f"The first letter of {w} is {w[0]}."


def repeat(rng):
    w = rng.choice(WORDS)
    n = rng.randint(2, 12)
    if rng.random() < 0.5:
        return f"Say {w} {n} times.", None, " ".join([w] * n)
    s = " ".join(rng.choice(WORDS) for _ in range(rng.randint(4, 40)))
    return pick(rng, f"Repeat after me: {s}", f"Copy this text exactly: {s}"), None, s


_PLAIN = "\n".join(t for t in topics.values() if t.isascii())


def passage(rng, low=20, high=300):
    """A random stretch of ordinary English and code, from Python's own help texts."""
    i, n = rng.randrange(len(_PLAIN) - high), rng.randint(low, high)
    return " ".join(_PLAIN[i : i + n].split(" ")[1:-1]).strip() or "Python"


def copy_passage(rng):
    s = passage(rng)
    return pick(rng, f"Repeat after me: {s}", f"Copy this text exactly: {s}"), None, s


def random_string(rng):
    s = "".join(chr(rng.randint(33, 126)) for _ in range(rng.randint(3, 24)))
    return f"Copy this text exactly: {s}", None, s


def ordering(rng):
    kind = rng.randrange(4)
    if kind == 0:
        xs = rng.sample(range(100), rng.randint(3, 7))
        return f"Sort these numbers: {', '.join(map(str, xs))}.", None, ", ".join(map(str, sorted(xs)))
    if kind == 1:
        xs = rng.sample(range(100), rng.randint(3, 7))
        return f"What is the largest of {', '.join(map(str, xs))}?", None, f"The largest number is {max(xs)}."
    if kind == 2:
        xs = rng.sample(WORDS, rng.randint(3, 6))
        return f"Sort these words: {', '.join(xs)}.", None, ", ".join(sorted(xs))
    name, seq = rng.choice([("months", MONTHS), ("days of the week", DAYS), ("planets", PLANETS)])
    return (
        pick(rng, f"List the {name}.", f"Name all the {name}."),
        None,
        "\n".join(f"{i}. {x}" for i, x in enumerate(seq, 1)),
    )


def person(rng):
    return {"name": rng.choice(NAMES), "age": rng.randint(18, 80), "city": rng.choice(CITIES), "job": rng.choice(JOBS)}


def extraction(rng):
    p = person(rng)
    text = pick(
        rng,
        f"{p['name']} is a {p['age']} year old {p['job']} from {p['city']}.",
        f"{p['name']} lives in {p['city']}, works as a {p['job']} and is {p['age']} years old.",
    )
    kind = rng.randrange(3)
    if kind == 0:
        return f"Extract the facts as JSON: {text}", None, json.dumps(p)
    if kind == 1:
        k = rng.choice(["age", "city", "job"])
        return f"{text} What is the {k} of {p['name']}?", None, f"{p['name']}: {p[k]}"
    ps = [person(rng) for _ in range(rng.randint(2, 5))]
    q = "Make a table: " + "; ".join(f"{p['name']}, {p['age']}, {p['city']}" for p in ps)
    return (
        q,
        None,
        "| name | age | city |\n| --- | --- | --- |\n"
        + "\n".join(f"| {p['name']} | {p['age']} | {p['city']} |" for p in ps),
    )


def make_json(rng):
    p = person(rng)
    keys = rng.sample(list(p), rng.randint(1, 4))
    return (
        f"Write a JSON object with {', '.join(f'{k} {p[k]}' for k in keys)}.",
        None,
        json.dumps({k: p[k] for k in keys}),
    )


def translate(rng):
    lang = rng.choice(list(TRANSLATE))
    w = rng.choice(list(TRANSLATE[lang]))
    return (
        pick(rng, f"Translate {w} to {lang}.", f"How do you say {w} in {lang}?"),
        None,
        f"{w} in {lang} is {TRANSLATE[lang][w]}.",
    )


def recall(rng):
    """Find one record among many: the answer needs attention over the whole prompt."""
    n = rng.choice([3, 4, 6, 8, 8, 12, 16, 16, 24, 32, 64, 100])
    names = [f"{rng.choice(COLORS)} {rng.choice(ANIMALS)}" for _ in range(n)]
    names = list(dict.fromkeys(names))
    codes = [str(rng.randint(100, 999)) for _ in names]
    lines = "\n".join(f"{k}: {v}" for k, v in zip(names, codes))
    i = rng.randrange(len(names))
    return f"Codes:\n{lines}\nWhat is the code of the {names[i]}?", None, f"The code of the {names[i]} is {codes[i]}."


FUNCTIONS = [
    ("adds two numbers", "add", "a, b", "return a + b"),
    ("subtracts two numbers", "subtract", "a, b", "return a - b"),
    ("multiplies two numbers", "multiply", "a, b", "return a * b"),
    ("returns the larger of two numbers", "largest", "a, b", "if a > b:\n        return a\n    return b"),
    ("checks if a number is even", "is_even", "n", "return n % 2 == 0"),
    ("reverses a string", "reverse", "text", "return text[::-1]"),
    (
        "sums a list",
        "total",
        "values",
        "result = 0\n    for value in values:\n        result += value\n    return result",
    ),
    ("computes the factorial", "factorial", "n", "if n <= 1:\n        return 1\n    return n * factorial(n - 1)"),
    ("counts the words in a text", "count_words", "text", "return len(text.split())"),
    (
        "computes Fibonacci numbers",
        "fibonacci",
        "n",
        "a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    ),
    (
        "finds the maximum of a list",
        "maximum",
        "values",
        "best = values[0]\n    for value in values:\n        if value > best:\n            best = value\n    return best",
    ),
    ("prints numbers", "show", "n", "for i in range(n):\n        print(i)"),
]


def code(rng):
    what, name, args, body = rng.choice(FUNCTIONS)
    if rng.random() < 0.3:
        name = pick(rng, "solve", "run", name, f"my_{name}")
        if "factorial(" in body:
            body = body.replace("factorial(", f"{name}(")
        q = f"Write a Python function named {name} that {what}."
    else:
        q = f"Write a Python function that {what}."
    return q, None, f'```python\ndef {name}({args}):\n    """This function {what}."""\n    {body}\n```'


def story(rng):
    who, animal, friend = rng.choice(NAMES), rng.choice(ANIMALS), rng.choice(ANIMALS)
    color, place, food = rng.choice(COLORS), rng.choice(PLACES), rng.choice(FOODS)
    parts = [
        pick(
            rng,
            f"Once upon a time there was a {color} {animal} named {who}.",
            f"Long ago, a little {animal} called {who} lived near the {place}.",
            f"{who} was a small {color} {animal} who loved {food}.",
        ),
        pick(
            rng,
            f"Every day {who} walked to the {place}.",
            f"{who} liked to play in the {place}.",
            f"One morning {who} went to the {place} to find some {food}.",
        ),
        pick(
            rng,
            f"There {who} met a {friend}.",
            f"Suddenly a {friend} came out of the trees.",
            f"On the way {who} saw a sad {friend}.",
        ),
        pick(
            rng,
            f'"Hello," said the {friend}. "I am hungry."',
            f"The {friend} was lost and could not find the way home.",
            f'"Can you help me?" asked the {friend}.',
        ),
        pick(
            rng,
            f"{who} shared the {food} with the {friend}.",
            f"{who} showed the {friend} the way to the {place}.",
            f"{who} thought for a while and then had a good idea.",
        ),
        pick(
            rng,
            f"They laughed and played until the sun went down.",
            f"They sat by the {place} and looked at the stars.",
            f"The {friend} smiled and said thank you.",
        ),
        pick(
            rng,
            f"From that day on they were best friends.",
            f"And {who} was very happy.",
            f"{who} went home and slept well.",
        ),
    ]
    n = rng.randint(4, 7)
    topic = pick(rng, f"a {animal}", f"a {animal} named {who}", "friendship", f"the {place}")
    return (
        pick(rng, f"Tell me a story about {topic}.", f"Write a short story about {topic}."),
        None,
        " ".join(parts[: n - 1] + parts[-1:]),
    )


def small_talk(rng):
    return (
        *rng.choice(
            [
                ("Hello!", None, "Hello! How can I help you today?"),
                ("Hi", None, "Hello! How can I help you today?"),
                ("Good morning.", None, "Good morning! What can I do for you?"),
                (
                    "Who are you?",
                    None,
                    "I am a tiny demonstration model. I can count, sort, translate a few words, write small programs and tell stories.",
                ),
                (
                    "What can you do?",
                    None,
                    "I can count, sort, do simple arithmetic, name capitals, write JSON, call tools, write small programs and tell short stories.",
                ),
                ("Thank you.", None, "You are welcome!"),
                ("How are you?", None, "I am fine, thank you. How can I help you?"),
                ("Goodbye.", None, "Goodbye! Have a nice day."),
            ]
        ),
    )


TASKS = [
    (capital, 12),
    (element, 3),
    (arithmetic, 14),
    (count, 10),
    (spelling, 8),
    (repeat, 10),
    (ordering, 8),
    (copy_passage, 6),
    (random_string, 2),
    (extraction, 8),
    (make_json, 4),
    (translate, 4),
    (recall, 12),
    (code, 6),
    (story, 14),
    (small_talk, 3),
]
_FUNCS, _WEIGHTS = zip(*TASKS)


# --- tools ----------------------------------------------------------------------------------------


def quote(value):
    """Render a value the way Gemma 4 writes tool arguments."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{quote(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(quote(v) for v in value) + "]"
    return str(value)


def declaration(name, description, properties):
    """Render one tool declaration: properties maps name -> (type, description)."""
    props = ",".join(
        f"{k}:{{description:{quote(d)},type:{quote(t.upper())}}}" for k, (t, d) in sorted(properties.items())
    )
    required = ",".join(quote(k) for k in properties)
    return (
        f"{TOOL}declaration:{name}{{description:{quote(description)},parameters:{{properties:{{{props}}},"
        f"required:[{required}],type:{quote('OBJECT')}}}}}{END_TOOL}"
    )


TOOLS = {
    "get_weather": ("Get the weather in a city.", {"city": ("string", "The city.")}),
    "add": ("Add two numbers.", {"a": ("integer", "First number."), "b": ("integer", "Second number.")}),
    "search": ("Search the web.", {"query": ("string", "What to search for.")}),
    "set_timer": ("Set a timer.", {"minutes": ("integer", "How many minutes.")}),
    "send_message": (
        "Send a message to a person.",
        {"name": ("string", "Who gets it."), "text": ("string", "The message.")},
    ),
    "play_music": ("Play music.", {"genre": ("string", "The kind of music.")}),
}


def tool_request(rng, name):
    if name == "get_weather":
        city = rng.choice(CITIES)
        t, sky = rng.randint(-5, 35), rng.choice(["sunny", "cloudy", "rainy", "windy"])
        return (
            pick(rng, f"What is the weather in {city}?", f"How is the weather in {city} today?"),
            {"city": city},
            {"sky": sky, "temperature": t},
            f"The weather in {city} is {sky} with {t} degrees.",
        )
    if name == "add":
        a, b = rng.randint(100, 9999), rng.randint(100, 9999)
        return f"Use the tool to add {a} and {b}.", {"a": a, "b": b}, {"result": a + b}, f"{a} + {b} = {a + b}"
    if name == "search":
        q = f"{rng.choice(COLORS)} {rng.choice(ANIMALS)}"
        return f"Search for {q}.", {"query": q}, {"hits": rng.randint(1, 99)}, f"I searched for {q}."
    if name == "set_timer":
        m = rng.randint(1, 60)
        return (
            pick(rng, f"Set a timer for {m} minutes.", f"Start a {m} minute timer."),
            {"minutes": m},
            {"ok": True},
            f"The timer is set for {m} minutes.",
        )
    if name == "send_message":
        n, t = rng.choice(NAMES), f"I like the {rng.choice(PLACES)}"
        return f"Tell {n}: {t}.", {"name": n, "text": t}, {"ok": True}, f"I sent the message to {n}."
    g = rng.choice(["jazz", "rock", "folk", "classical"])
    return f"Play some {g}.", {"genre": g}, {"ok": True}, f"Playing {g} music."


SYSTEMS = [
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are a friendly teacher.",
    "Be kind and clear.",
    "You are a helpful assistant. Answer the question.",
]


def turn(role, text):
    return f"{TURN}{role}\n{text}{END_TURN}\n"


def conversation(rng):
    thinking = rng.random() < 0.25
    use_tools = rng.random() < 0.15
    system = "" if not thinking else THINK + "\n"
    if rng.random() < 0.4:
        system += rng.choice(SYSTEMS)
    names = []
    if use_tools:
        names = rng.sample(list(TOOLS), rng.randint(1, 4))
        system += "".join(declaration(n, *TOOLS[n]) for n in names)
    out = BOS + (turn("system", system) if system else "")
    for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
        if names and rng.random() < 0.8:
            name = rng.choice(names)
            q, args, result, a = tool_request(rng, name)
            body = f"{CHANNEL}thought\nI should call {name}.\n{END_CHANNEL}" if thinking else ""
            body += f"{CALL}call:{name}{quote(args)}{END_CALL}"
            out += turn("user", q)
            if rng.random() < 0.3:  # a call that ends the turn
                out += turn("model", body)
                continue
            body += f"{RESPONSE}response:{name}{quote(result)}{END_RESPONSE}{a}"
            out += turn("model", body)
            continue
        q, thought, a = rng.choices(_FUNCS, _WEIGHTS)[0](rng)
        out += turn("user", q)
        if thinking:
            out += turn("model", f"{CHANNEL}thought\n{thought or 'This is easy.'}\n{END_CHANNEL}{a}")
        else:
            out += turn("model", a)
    return out


def generate(rng: random.Random) -> str:
    """One training document: mostly conversations, now and then plain text."""
    if rng.random() < 0.04:
        return BOS + passage(rng, 200, 2000) + "<eos>"
    return conversation(rng)


if __name__ == "__main__":
    r = random.Random(0)
    for _ in range(12):
        print(generate(r))
        print("=" * 60)
