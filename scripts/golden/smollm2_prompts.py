# SPDX-License-Identifier: Apache-2.0
"""The 20 prompts of tests/golden/smollm2: (name, chat turns) or (name, plain text)."""


def user(text, system=None):
    turns = [{"role": "system", "content": system}] if system else []
    return turns + [{"role": "user", "content": text}]


PROMPTS = [
    ("chat-capital", user("What is the capital of France, and what is it known for?")),
    ("chat-poem", user("Write a short poem about the sea in autumn.")),
    ("chat-system", user("Explain why the sky is blue.",
                         "You are a patient teacher. Answer in plain words.")),
    ("chat-list", user("Give me five tips for learning to cook at home.")),
    ("chat-arithmetic", user("I have 12 apples, give away 5 and buy 9 more. How many do I have?")),
    ("chat-python", user("Write a Python function that checks whether a word is a palindrome.")),
    ("chat-turns", user("Name a large river in Africa.") + [
        {"role": "assistant", "content": "The Nile is a large river in Africa."},
        {"role": "user", "content": "Which countries does it flow through?"}]),
    ("chat-rewrite", user("Rewrite this more politely: 'Send me the report now.'")),
    ("chat-unicode", user("Translate 'Bonjour, ça va très bien' and '你好' to English.")),
    ("chat-summary", user(
        "Summarise in one sentence: The lighthouse was built in 1823 on a reef two miles off the "
        "coast. Keepers lived there for a month at a time, trimming the lamp every four hours. In "
        "1961 it was automated, and the last keeper rowed home on a calm morning in May.")),
    ("text-novel", "It was a bright cold day in April, and the clocks were"),
    ("text-science", "Photosynthesis is the process by which green plants"),
    ("text-history",
     "The Roman Empire reached its greatest extent under the emperor Trajan. After"),
    ("text-recipe", "Ingredients:\n- 200 g flour\n- 2 eggs\n- 300 ml milk\n\nMethod:\n1."),
    ("text-list-numbers", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,"),
    ("code-c", "#include <stdio.h>\n\n/* Returns the greatest common divisor. */\nint gcd(int a, "
               "int b)\n{\n"),
    ("code-python", "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n"),
    ("code-sql", "-- Customers who ordered more than ten times in 2023\nSELECT"),
    ("math-algebra", "Problem: Solve 3x + 7 = 22 for x.\nSolution: Subtract 7 from both sides:"),
    ("math-words", "A train travels 60 miles in 1.5 hours. Its average speed is"),
]
