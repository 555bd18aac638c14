#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvdrive chat under a pseudo-terminal: what is typed, what the terminal shows of it (by pyte, an
emulator), and what the model gets (by /save).  KVDRIVE is the program, KVD_TEST_FAULT the one whose
steps take at least 2 ms; runs in the source root.  run FILE NAME runs one test."""
import fcntl
import json
import os
import pathlib
import pty
import re
import select
import signal
import stat
import struct
import sys
import tempfile
import termios
import time
import traceback

try:
    import pyte
except ImportError:  # Debian's Python has it (python3-pyte), another may not
    if sys.executable != "/usr/bin/python3" and os.path.exists("/usr/bin/python3"):
        os.execv("/usr/bin/python3", ["/usr/bin/python3", *sys.argv])
    print("skipped: no pyte (apt-get install python3-pyte)")
    sys.exit(77)

PROGRAM = os.path.abspath(os.environ.get("KVDRIVE", "build/release/kvdrive"))
FAULT = os.path.abspath(os.environ.get("KVD_TEST_FAULT", "build/release/tests/kvdrive_fault"))
LIMIT_S = 60 * float(os.environ.get("KVD_TEST_SLOW", "1"))  # until something shows that must
MODEL = ["-m", "tests/data/tiny/llama.gguf", "--chat-template", "tests/server/data/chatml.jinja",
         "--rope-scaling", "linear", "--rope-scale", "64", "-c", "4000", "--temp", "0", "-t", "1",
         "-l", "261-100"]
LEFT, RIGHT, UP, DOWN, DELETE = "\x1b[D", "\x1b[C", "\x1b[A", "\x1b[B", "\x1b[3~"
BACK, ENTER, ALT_ENTER, CTRL_C, CTRL_D = "\x7f", "\r", "\x1b\r", "\x03", "\x04"
PASTE, PASTED = "\x1b[200~", "\x1b[201~"


class Chat:
    """A conversation on a terminal of its own; its files are in home."""

    def __init__(self, home, *args, columns=80, rows=24, program=PROGRAM, answer=2, term="xterm",
                 shell=False):
        self.home, self.screen = home, pyte.HistoryScreen(columns, rows, history=500)
        self.stream, self.text, self.status = pyte.ByteStream(self.screen), b"", None
        (home / "state").mkdir(exist_ok=True)
        env = {"PATH": os.environ["PATH"], "HOME": str(home), "XDG_STATE_HOME": str(home / "state"),
               "XDG_DATA_HOME": str(home / "data"), "XDG_CONFIG_HOME": "/nonexistent",
               "LC_ALL": "C", "TERM": term,
               **{k: v for k, v in os.environ.items() if k.endswith("SAN_OPTIONS")}}
        self.master, self.slave = pty.openpty()
        self.before = termios.tcgetattr(self.slave)
        self.set_size(columns, rows)
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.master)
            login(self.slave)
            if shell:
                self.pid = be_shell(self.slave, home / "stopped")
            os.execve(program, [program, "chat", *MODEL, "-n", str(answer), *args], env)
        if args[:1] != ("-p",):
            self.prompt()

    def __enter__(self):
        return self

    def __exit__(self, kind, *rest):
        if kind:
            print("screen:", *self.screen.display, sep="\n|", flush=True)
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.master)
        os.close(self.slave)

    def set_size(self, columns, rows):
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def resize(self, columns, rows):
        self.screen.resize(rows, columns)
        self.set_size(columns, rows)

    def see(self, wait_s=0.0):
        """Follows what the program has written."""
        while select.select([self.master], [], [], wait_s)[0]:
            try:
                block = os.read(self.master, 65536)
            except OSError:
                return
            self.text += block
            self.stream.feed(block)
            wait_s = 0.0

    def until(self, what, seconds=LIMIT_S):
        """Waits until what() is true."""
        end = time.monotonic() + seconds
        while not what():
            assert time.monotonic() < end, ("not in time", self.text[-300:])
            self.see(0.02)

    def send(self, text):
        data = text if isinstance(text, bytes) else text.encode()
        while data:
            self.see()
            data = data[os.write(self.master, data[:512]):]

    def rows(self):
        """The screen's rows down to the last that is not empty."""
        lines = [line.rstrip() for line in self.screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    def cursor(self):
        return self.screen.cursor.y, self.screen.cursor.x

    def at_prompt(self):
        return self.rows()[-1:] == [">"] and self.screen.cursor.x == 2

    def prompt(self):
        self.until(self.at_prompt)

    def shows(self, last, column):
        """The last row and the cursor's column in it become these."""
        self.until(lambda: self.rows()[-1:] == [last] and self.screen.cursor.x == column, 20)

    def say(self, text):
        """Sends a message and waits for the answer's end."""
        n = len(self.text)
        self.send(text + ENTER)
        self.until(lambda: b"\n" in self.text[n:])
        self.prompt()

    def messages(self):
        """What the model was told, and what it said."""
        self.say("/save test")
        path = self.home / "data/kvdrive/chats/test.json"
        return [(m["role"], m["content"]) for m in json.loads(path.read_text())["messages"]]

    def asked(self):
        return [text for role, text in self.messages() if role == "user"]

    def wait(self):
        """The exit status, once it has ended."""
        def ended():
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
            return bool(pid)
        self.until(ended)
        self.see()
        return self.status


def login(fd):
    os.setsid()
    fcntl.ioctl(fd, termios.TIOCSCTTY, 0)
    for k in range(3):
        os.dup2(fd, k)


def be_shell(fd, stopped):
    """A shell's part: returns in the child, its foreground job; the parent says when that stops."""
    pid = os.fork()
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    os.setpgid(pid, pid)
    os.tcsetpgrp(fd, pid or os.getpid())
    if pid == 0:
        signal.signal(signal.SIGTTOU, signal.SIG_DFL)
        return os.getpid()
    while True:
        status = os.waitpid(pid, os.WUNTRACED)[1]
        if not os.WIFSTOPPED(status):
            os._exit(os.waitstatus_to_exitcode(status))
        stopped.write_text(str(pid))


def test_types_any_character(home):
    with Chat(home) as c:
        c.send("naïve 日本")
        c.until(lambda: c.cursor()[1] == 12)
        assert c.rows()[-1].replace(" ", "") == ">naïve日本", c.rows()
        c.send(ENTER)
        c.prompt()
        c.say("ÄÖ €")
        assert c.asked() == ["naïve 日本", "ÄÖ €"]
        c.send(b"\xc3")  # a character comes in parts
        c.see(0.02)
        c.send(b"\xa9t\xff\xc3\xa9")
        c.until(lambda: c.rows()[-1] == "> ét\ufffdé")
        c.send(CTRL_D * 2)  # nothing to the right: it stays
        c.send(CTRL_C)
        c.prompt()
        assert "(Ctrl-D or /quit leaves)" in c.rows(), c.rows()
        c.send(CTRL_D)
        assert c.wait() == 0


def test_erases_whole_characters(home):
    with Chat(home) as c:
        c.send("a日本e\u0301x")
        c.until(lambda: c.cursor()[1] == 9)
        c.send(BACK)
        c.until(lambda: c.cursor()[1] == 8)
        c.send(BACK)  # the letter and its accent
        c.until(lambda: c.cursor()[1] == 7)
        assert c.rows()[-1].replace(" ", "") == ">a日本", c.rows()
        c.send(BACK)
        c.until(lambda: c.cursor()[1] == 5)
        assert c.rows()[-1].replace(" ", "") == ">a日", c.rows()
        c.send(LEFT + LEFT + DELETE + RIGHT + "語")
        c.until(lambda: c.rows()[-1].replace(" ", "") == ">日語")
        c.send(LEFT + "👩\u200d🚀" + "!" + LEFT + BACK)  # one character of three code points
        c.until(lambda: c.rows()[-1].replace(" ", "") == ">日!語")
        c.send("\x01" + "e" + "\x05" + "\u0301" + "\x17" + "one two" + "\x17")  # ends, words
        c.until(lambda: c.rows()[-1].replace(" ", "") == ">e日!one")
        c.say("\x15three" + "\x1bb" + "\x0b" + "\x19\x19")  # kill, and twice back
        assert c.asked() == ["threethree"]


def test_history(home):
    with Chat(home) as c:
        c.say("first")
        c.say("second\\" + ENTER + "of two")
        c.send("draft" + "\x10")
        c.shows(". of two", 8)
        c.send("\x10")
        c.shows("> first", 7)
        c.send("\x0e\x0e")
        c.shows("> draft", 7)
        c.send(UP)
        c.shows(". of two", 8)
        c.send(UP)  # a row of this one
        c.until(lambda: c.cursor()[1] == 8 and c.rows()[-1] == ". of two" and
                c.cursor()[0] == len(c.rows()) - 2)
        c.send(UP)
        c.shows("> first", 7)
        c.say(" again")
        assert c.asked() == ["first", "second\nof two", "first again"]
    path = home / "state/kvdrive_history"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().splitlines()[:3] == ["first", "second\\nof two", "first again"]
    path.write_text("_HiStOrY_V2_\nan\\040old\\040one\\\\\n")  # libedit's
    with Chat(home) as c:
        c.send(UP)
        c.shows("> an old one\\", 13)
        assert path.read_text() == "an old one\\\\\n"


def test_resize(home):
    with Chat(home, columns=40, rows=10) as c:
        text = "0123456789" * 5
        c.send(text)
        c.shows(text[38:], 12)
        assert c.rows()[-2] == "> " + text[:38]
        c.resize(80, 10)
        c.shows("> " + text, 52)
        c.send("日" * 14)
        c.until(lambda: c.cursor()[1] == 0)  # the row is full: the cursor is in the next
        c.send("x")
        c.shows("x", 1)
        c.resize(100, 5)
        c.until(lambda: c.cursor()[1] == 81)
        before = c.rows()[:-1]
        c.send("\x01")
        c.until(lambda: c.cursor()[1] == 2)
        assert c.rows()[:-1] == before
        c.send("\x05")
        for line in range(12):  # more rows than the terminal has
            c.send(ALT_ENTER + f"line {line}")
        c.shows(". line 11", 9)
        assert c.rows() == [f". line {n}" for n in range(7, 12)], c.rows()
        c.send(UP * 11)
        c.until(lambda: c.rows()[0] == ". line 0" and c.cursor()[0] == 0)
        c.send(ENTER)
        c.prompt()
        lines = c.asked()[0].split("\n")
        assert lines == [text + "日" * 14 + "x", *(f"line {n}" for n in range(12))], lines


def test_paste_is_one_message(home):
    with Chat(home) as c:
        assert b"\x1b[?2004h" in c.text
        c.send(PASTE + "one\rtwo\n")
        c.see(0.1)
        c.send("/quit" + PASTED[:3])
        c.see(0.1)
        c.send(PASTED[3:])
        c.shows(". /quit", 7)
        assert c.rows()[-3:] == ["> one", ". two", ". /quit"]
        c.send(ENTER)
        c.prompt()
        c.say("é" + PASTE + "\x1b[Aa\tb\x1b[201" + PASTED)
        c.say(PASTE + "x" * 100000 + PASTED)
        asked = c.asked()
        assert asked[:2] == ["one\ntwo\n/quit", "é\x1b[Aa\tb\x1b[201"], asked[:2]
        c.send(PASTE + "its end is lost")
        c.see(0.1)
        c.send(CTRL_C)
        c.prompt()
        c.send("/quit" + ENTER)
        assert c.wait() == 0
        assert c.text.endswith(b"\x1b[?2004l")


def test_several_lines(home):
    with Chat(home) as c:
        c.send('"""' + ENTER + "a \\" + ENTER + ENTER + 'b' + ENTER)
        c.shows(".", 2)
        c.say('"""')
        c.say('"""c' + ENTER + 'd"""')
        c.say("e" + ALT_ENTER + "f" + "\x1b[13;2u" + "g")
        c.say("h\\" + ENTER + "i")
        assert c.asked() == ["a \\\n\nb", "c\nd", "e\nf\ng", "h\ni"], c.asked()


def slow(home, answer=3000):
    c = Chat(home, program=FAULT, answer=answer)
    os.kill(c.pid, signal.SIGRTMIN + 19)  # a prompt's token takes 0.9 ms
    return c


def test_interrupt_with_typing_ahead(home):
    for typed in ("x" * 5000, ("y" * 60 + ENTER) * 80, ""):
        with slow(home) as c:
            c.send("go" + ENTER)
            c.until(lambda: len(c.rows()) > 2 or len(c.text) > 3000)
            c.send(typed)
            time.sleep(0.2)
            began = time.monotonic()
            c.send(CTRL_C)
            c.prompt()
            assert time.monotonic() - began < 2 * LIMIT_S / 60 + 1
            assert b"xxx" not in c.text and b"yyy" not in c.text
            asked = c.asked()
            assert asked == ["go"], asked
            (role, answer), = [m for m in c.messages() if m[0] == "assistant"]
            assert 0 < len(answer) and role == "assistant"
        # in the prompt's evaluation, typed at once: as if not asked
        with slow(home) as c:
            c.send("z" * 1500 + ENTER + typed + CTRL_C)
            c.until(lambda: c.at_prompt() and c.rows()[-2].startswith("zzz"))
            assert c.asked() == []


def test_typing_is_not_mixed_into_the_answer(home):
    with slow(home, answer=500) as c:
        n = len(c.text)
        c.send("go" + ENTER)
        c.until(lambda: len(c.text) - n > 300)
        n = len(c.text)
        c.send("nächste 日")
        c.send(PASTE + "\nline" + PASTED)
        c.until(lambda: len(c.text) - n > 300)
        assert b"chste" not in c.text and b"line" not in c.text
        c.until(lambda: c.rows()[-1] == ". line")
        assert c.rows()[-2].replace(" ", "") == ">nächste日", c.rows()
        answer = c.text.split(b"go", 1)[1]
        c.send(ENTER)
        c.until(lambda: len(c.text) - len(answer) > 1000)
        c.send(CTRL_C)
        c.prompt()
        assert c.asked() == ["go", "nächste 日\nline"]
        said = [text for role, text in c.messages() if role == "assistant"][0]
        shown = answer.decode(errors="replace").replace("\r\n", "\n")
        assert said[:200] in shown and said[-200:] in shown


def test_read_save_load(home):
    (home / "text.txt").write_text("from a file: ä")
    (home / "bytes").write_bytes(b"\xff")
    with Chat(home, "--system", "be brief") as c:
        c.say("/read ~/text.txt")
        assert "15 bytes, which go before your next message" in c.rows(), c.rows()
        c.say("what is it?")
        c.say("/read ~/none")
        assert any("none: No such file" in line for line in c.rows())
        c.say("/read ~/bytes")
        assert any("byte 0 (0xff) is not UTF-8" in line for line in c.rows())
        c.say("/read")
        assert any("takes the name of a file" in line for line in c.rows())
        told = c.messages()
        assert told[:2] == [("system", "be brief"), ("user", "from a file: ä\n\nwhat is it?")]
        c.say("/save ../x")
        assert any("no name for a conversation" in line for line in c.rows())
    path = home / "data/kvdrive/chats/test.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (path.parent / "bad.json").write_text('{"messages":[{"role":"user","content":7}]}')
    with Chat(home, rows=40) as c:
        c.say("/load")
        assert any(re.fullmatch("saved: (bad test|test bad)", line) for line in c.rows())
        c.say("/load nosuch")
        assert any("no conversation 'nosuch' was saved" in line for line in c.rows())
        c.say("/load bad")
        assert any("not a conversation" in line for line in c.rows())
        c.say("/load test")
        assert "test has 3 messages" in c.rows()
        c.say("more")
        assert c.messages()[:4] == [*told, ("user", "more")]
        assert any("in place of what was there" in line for line in c.rows())


def test_single_turn_and_stop(home):
    with Chat(home, "-p", "a\\x41\\n", "-e", "-st", "--stop", "nothing has this") as c:
        assert c.wait() == 0
    with Chat(home, "-st") as c:
        c.send("hello" + ENTER)
        assert c.wait() == 0


def test_terminal_is_given_back(home):
    for end in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        with Chat(home) as c:
            now = termios.tcgetattr(c.slave)
            assert not now[3] & (termios.ECHO | termios.ICANON)
            os.kill(c.pid, end)
            assert os.WTERMSIG(c.wait()) == end
            assert termios.tcgetattr(c.slave) == c.before, end
            assert c.text.endswith(b"\x1b[?2004l")
    with Chat(home) as c:
        c.send("/exit" + ENTER)
        assert c.wait() == 0
        assert termios.tcgetattr(c.slave) == c.before
    with Chat(home, term="dumb") as c:  # lines as the terminal itself edits them
        assert termios.tcgetattr(c.slave) == c.before
        assert b"\x1b" not in c.text
        c.send("hello\n/quit\n")
        assert c.wait() == 0


def test_stops_and_goes_on(home):
    stopped = home / "stopped"

    def stop(c):
        c.send("\x1a")
        c.until(lambda: stopped.exists() and stopped.read_text())
        assert termios.tcgetattr(c.slave) == c.before
        pid = int(stopped.read_text())
        stopped.unlink()
        os.kill(pid, signal.SIGCONT)
        c.until(lambda: not termios.tcgetattr(c.slave)[3] & termios.ECHO)

    with Chat(home, program=FAULT, answer=1000, shell=True) as c:
        c.send("one")
        c.shows("> one", 5)
        stop(c)
        c.send(" two")
        c.shows("> one two", 9)
        n = len(c.text)
        c.send(ENTER)
        c.until(lambda: len(c.text) - n > 100)
        stop(c)
        n = len(c.text)
        c.until(lambda: len(c.text) - n > 100)
        c.send(CTRL_C)
        c.prompt()
        assert c.asked() == ["one two"]
        c.send(CTRL_D)
        assert c.wait() == 0


def main():
    tests = [f for name, f in globals().items() if name.startswith("test_")]
    failed = 0
    for test in tests:
        if sys.argv[1:] and test.__name__ not in sys.argv[1:]:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as home:
            try:
                test(pathlib.Path(home))
                print(f"{test.__name__}: {time.monotonic() - began:.1f} s", flush=True)
            except Exception:
                traceback.print_exc(file=sys.stdout)
                print(f"FAILED: {test.__name__}", flush=True)
                failed += 1
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
