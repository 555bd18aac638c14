#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Solves RULER prompts from their text alone and compares with the answers they came with.

usage: check_ruler.py FILE LENGTH DATA   lines of `kvdrive eval ruler --generate-only`

Every sample's answers are found again by other means than they were made: needles by pattern,
chains by following assignments, words by counting, questions by their document.
"""
import collections
import json
import re
import sys

NEEDLE = re.compile(r"One of the special magic (words|numbers|uuids) for ([^:]+?) is: "
                    r"([^\s]+?)\.(?=\s|$)")
KINDS = {"numbers": r"\d{7}",
         "uuids": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"}


def check(ok, *what):
    if not ok:
        sys.exit("FAILED: " + " ".join(str(x) for x in what))


def solve_niah(s):
    text = s["prompt"]
    body, question = text.rsplit("\n", 1)
    found = collections.defaultdict(list)
    for kind, key, value in NEEDLE.findall(body):
        check(re.fullmatch(KINDS[kind], value), "value", value)
        found[key].append(value)
    asked = re.search(r"for (.+) mentioned in the provided text\?$", question).group(1)
    asked = [a.strip() for a in asked.replace(", and ", ", ").split(", ")]
    many = len(asked) > 1 or "multivalue" in s["task"]
    check(("are all" in question) == many, "number of the question", question)
    check(s["answer_prefix"].endswith("are" if many else "is"), s["answer_prefix"])
    expected = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}
    n = sum(len(v) for v in found.values())
    if s["task"] in ("niah_multikey_2", "niah_multikey_3"):
        check(n > 5, "needles", n)
    else:
        check(n == expected.get(s["task"], 1), "needles", n)
    return [v for a in asked for v in found[a]]


def solve_vt(s):
    example, text = s["prompt"].split("\n\nMemorize", 1)
    for part, letters in ((example, 3), (text, 5)):
        value = re.search(r"assigned the value (\d+) in the text", part).group(1)
        assigned = dict(re.findall(r"VAR ([A-Z]+) = (?:VAR )?([A-Z]+|\d+)", part))
        check(all(len(k) == letters for k in assigned), "names", assigned)
        chain = [k for k, v in assigned.items() if v == value]
        while True:
            more = [k for k, v in assigned.items() if v == chain[-1]]
            if not more:
                break
            chain += more
        if part is example:
            check(part.strip().endswith("they are: " + " ".join(chain)), "example", chain)
    check("5 variables are assigned the value " + value in s["answer_prefix"], s["answer_prefix"])
    return chain


def solve_cwe(s):
    example, text = s["prompt"].split("\nBelow is", 1)
    words = re.findall(r"(?:^|[ \n])\d+\. ([^\n]+?)(?= \d+\. |\nQuestion)", text)
    counts = collections.Counter(words).most_common()
    check(counts[9][1] > counts[10][1], "no gap", counts[8:12])
    check(len(re.findall(r"\d+\. ", example.split("are:")[1])) == 10, "example")
    return [w for w, _ in counts[:10]]


def solve_fwe(s):
    text = s["prompt"].split("coded words. ", 1)[1].split("\nQuestion", 1)[0]
    counts = collections.Counter(text.split(" "))
    check(counts.most_common(1)[0][0] == "...", "noise is most frequent")
    del counts["..."]
    top = counts.most_common()
    check(top[2][1] > top[3][1], "no gap", top[:5])
    return [w for w, _ in top[:3]]


def solve_qa(s, data):
    question = s["prompt"].rsplit("Question: ", 1)[1]
    for article in data["data"]:
        for p in article["paragraphs"]:
            for q in p["qas"]:
                answers = [a["text"] for a in q["answers"]]
                if q["question"] == question and answers == s["answers"]:
                    check(p["context"] in s["prompt"], "the document is not there")
                    return answers
    check(False, "no such question:", question)


def main():
    path, length, data = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    xquad = json.load(open(data + "/xquad/xquad.en.json", encoding="utf-8"))
    essay = " ".join(open(data + "/austen/prideprejudice.txt", encoding="utf-8").read().split())
    seen = collections.Counter()
    for line in open(path, encoding="utf-8"):
        s = json.loads(line)
        task = s["task"]
        seen[task] += 1
        total = s["prompt_tokens"] + s["max_tokens"]
        check(total <= length, task, "takes", total)
        coarse = {"qa_1": 0.7, "vt": 0.9, "niah_multikey_3": 0.9}
        check(total > length * coarse.get(task, 0.94), task, "takes only", total)
        if task.startswith("niah"):
            answers = solve_niah(s)
            if task in ("niah_single_2", "niah_single_3") or task.startswith("niah_multiv"):
                rest = " ".join(NEEDLE.sub("", s["prompt"]).split("\n")[1].split())
                check(rest[:200] == essay[:200], task, "is no essay")
        elif task == "qa_1":
            answers = solve_qa(s, xquad)
        else:
            answers = {"vt": solve_vt, "cwe": solve_cwe, "fwe": solve_fwe}[task](s)
        check(sorted(answers) == sorted(s["answers"]), task, answers, "is not", s["answers"])
    check(len(seen) == 12 and len(set(seen.values())) == 1, seen)
    print(f"{sum(seen.values())} prompts of {len(seen)} tasks solved")


main()
