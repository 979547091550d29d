"""Twenty-two prompts for SmolLM2-135M-Instruct: chat, raw text, code, other scripts, one token, several pages."""

from __future__ import annotations


def chat(*turns: str) -> str:
    """ChatML; `turns` are user and assistant in turn, beginning with the user."""
    roles = ("user", "assistant")
    text = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    for i, turn in enumerate(turns):
        text += f"<|im_start|>{roles[i % 2]}\n{turn}<|im_end|>\n"
    return text + "<|im_start|>assistant\n"


_STORY = (
    "The lighthouse keeper wrote in his log every evening, whether or not a ship had passed. On the first page stood the "
    "date on which the lamp had been lit for the first time, and below it the names of the four men who had kept it "
    "before him. He had never met them. He knew them by their handwriting: one wrote in narrow letters that leaned "
    "against the wind, one drew small fish in the margins, one counted the days until his leave, and the last one "
    "had written nothing but the weather for eleven years. ")

PROMPTS: dict[str, str] = {
    "one token": "The",
    "one more": "\n",
    "two tokens": "Once upon",
    "raw fact": "The capital of France is",
    "raw list": "Monday, Tuesday, Wednesday,",
    "raw numbers": "1, 1, 2, 3, 5, 8, 13,",
    "raw recipe": "To make a simple tomato soup, first",
    "raw story": "It was a dark and stormy night, and the old house at the end of the lane",
    "raw science": "Photosynthesis is the process by which green plants",
    "question and answer": "Q: What is the boiling point of water at sea level?\nA:",
    "chat greeting": chat("Hello, who are you?"),
    "chat fact": chat("What is gravity?"),
    "chat code": chat("Write a Python function that reverses a string."),
    "chat translation": chat("Translate to French: The weather is nice today."),
    "chat second turn": chat("Name a colour.", "Blue.", "Name another one, and say what is painted in it."),
    "python": "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n    ",
    "c": "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "json": '{"name": "Ada", "born": 1815, "languages": ["English", "French"], "friends": [{"name": ',
    "german": "Die Hauptstadt von Österreich heißt Wien, und die größte Stadt der Schweiz ist",
    "japanese and emoji": "今日は、世界。 Grüße 👋👨‍👩‍👧 今天天气如何？",
    "several pages": _STORY * 3 + "One evening the lamp",
    "many pages": chat("Summarise this story in one sentence.\n\n" + _STORY * 6),
}
