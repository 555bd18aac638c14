#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Agents and libraries as they come, unmodified and in their default configuration: two turns, with
a tool's result between them.  The model says what its script says, so a small one will do.  Skipped
where `scripts/get-clients agents` has not run."""
from kvserver import Directory, Server, main, use_clients

use_clients("clients-agents")

import asyncio
import json
import os
import pathlib
import subprocess
import sys

import scripted

ANSWER = "There is one file."
STARTS = {"exec_command": "<|codex|>", "Bash": "<|claude|>", "weather": "<|weather|>"}
SCRIPTS = {"<|codex|>": scripted.call("exec_command", '{"cmd": "ls"}'),
           "<|claude|>": scripted.call("Bash", '{"command": "ls"}'),
           "<|weather|>": scripted.call("weather", '{"city": "Oslo"}'),
           "<|codex-in|>": scripted.call("multi_agent_v1__close_agent", '{"target": "x"}'),
           "<|claude-in|>": scripted.call("ToolSearch", '{"query": "select:WebFetch"}'),
           "<|done|>": ["There is", " one file."]}
BIN = pathlib.Path(sys.executable).parent


class Model:
    """A directory with the model, and a server of it: --chat-template is its own."""

    def __init__(self, starts=STARTS):
        self.starts = starts

    def __enter__(self):
        self.directory = Directory()
        self.path = pathlib.Path(self.directory.__enter__())
        for name in "home", "work":
            (self.path / name).mkdir()
        (self.path / "work" / "a.txt").write_text("a\n")
        scripted.write(self.path / "model.gguf", SCRIPTS, scripted.template(self.starts))
        template = self.path / "template.jinja"
        template.write_text(scripted.template(self.starts))
        self.server = Server("--chat-template", str(template), "--parallel", "2", ctx=200000,
                             model=str(self.path / "model"))
        self.server.__enter__()
        self.root = f"http://127.0.0.1:{self.server.port}"
        return self

    def __exit__(self, *what):
        self.server.__exit__(*what)
        self.directory.__exit__(*what)

    def run(self, *command, **env):
        """A program's output; it has a home of its own and knows nothing but the server."""
        done = subprocess.run(command, cwd=self.path / "work", stdin=subprocess.DEVNULL,
                              env={"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(self.path / "home"),
                                   "LANG": "C.UTF-8", **env},
                              text=True, capture_output=True, timeout=120)
        assert done.returncode == 0, (done.returncode, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout

    def check(self, route, n=2):
        """n answers by that route at least (Claude Code also asks for a title), nothing refused."""
        def answers():
            return [x for x in self.server.lines if f": {route}, " in x]
        self.server.wait_for(lambda: len(answers()) >= n)
        bad = [x for x in self.server.lines if ": status 4" in x and "/api/hello" not in x]
        assert not bad, bad


def test_codex():
    """A tool, and one in a namespace."""
    for starts, ran in (({"exec_command": "<|codex|>"}, "Process exited"),
                        ({"multi_agent_v1__close_agent": "<|codex-in|>"}, "agent id")):
        with Model(starts) as m:
            config = m.path / "home" / ".codex"
            config.mkdir()
            (config / "config.toml").write_text(
                'model = "kvdrive"\nmodel_provider = "kvdrive"\n[model_providers.kvdrive]\n'
                f'name = "kvdrive"\nbase_url = "{m.root}/v1"\nwire_api = "responses"\n')
            out = m.run("codex", "exec", "--skip-git-repo-check", "list the files")
            assert ANSWER in out, out
            logs = "".join(p.read_text() for p in config.glob("sessions/**/*.jsonl"))
            assert ran in logs, logs[-3000:]
            m.check("/v1/responses")


async def ask_claude(m, events):
    from claude_agent_sdk import ClaudeAgentOptions, query
    options = ClaudeAgentOptions(
        model="kvdrive", cwd=str(m.path / "work"),
        env={"ANTHROPIC_BASE_URL": m.root, "ANTHROPIC_AUTH_TOKEN": "x",
             "HOME": str(m.path / "home")})
    async for event in query(prompt="list the files", options=options):
        events.append(event)


def test_claude_code():
    """A tool that it runs, and one that loads a deferred one."""
    for starts, result in (({"Bash": "<|claude|>"}, "a.txt"),
                           ({"ToolSearch": "<|claude-in|>"}, "WebFetch")):
        with Model(starts) as m:
            events = []
            asyncio.run(ask_claude(m, events))
            assert events[-1].result == ANSWER and not events[-1].is_error, events
            results = [b for e in events for b in getattr(e, "content", None) or []
                       if type(b).__name__ == "ToolResultBlock"]
            assert len(results) == 1 and not results[0].is_error, events
            assert result in json.dumps(results[0].content), results
            m.check("/v1/messages")


def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def test_openai_agents():
    import agents
    import openai
    agents.set_tracing_disabled(True)
    for api, route in (("responses", "/v1/responses"), ("chat_completions",
                                                        "/v1/chat/completions")):
        with Model() as m:
            agents.set_default_openai_api(api)
            agents.set_default_openai_client(openai.AsyncOpenAI(base_url=m.root + "/v1",
                                                                api_key="x"), False)
            agent = agents.Agent(name="a", instructions="Be brief.", model="kvdrive",
                                 tools=[agents.function_tool(weather)])
            run = agents.Runner.run_sync(agent, "Oslo?")
            assert run.final_output == ANSWER, run
            outputs = [i.output for i in run.new_items if i.type == "tool_call_output_item"]
            assert outputs == ["rain in Oslo"], run.new_items
            m.check(route)


def test_langchain():
    from langchain.agents import create_agent
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI
    for kind, more, route in ((ChatOpenAI, {}, "/v1/chat/completions"),
                              (ChatOpenAI, {"use_responses_api": True}, "/v1/responses"),
                              (ChatAnthropic, {}, "/v1/messages")):
        with Model() as m:
            base = m.root + ("/v1" if kind is ChatOpenAI else "")
            chat = kind(model="kvdrive", base_url=base, api_key="x", **more)
            said = create_agent(chat, tools=[weather]).invoke({"messages": [("user", "Oslo?")]})
            kinds = [x.type for x in said["messages"]]
            assert kinds == ["human", "ai", "tool", "ai"], said
            assert said["messages"][2].content == "rain in Oslo"
            assert said["messages"][3].text == ANSWER, said
            m.check(route)


def test_litellm():
    import litellm
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}}}}]
    for provider, base, route in (("openai", "/v1", "/v1/chat/completions"),
                                  ("hosted_vllm", "/v1", "/v1/chat/completions"),
                                  ("anthropic", "", "/v1/messages")):
        with Model() as m:
            ask = dict(model=f"{provider}/kvdrive", api_base=m.root + base, api_key="x",
                       tools=tools)
            messages = [{"role": "user", "content": "Oslo?"}]
            said = litellm.completion(messages=messages, **ask).choices[0].message
            call = said.tool_calls[0]
            assert json.loads(call.function.arguments) == {"city": "Oslo"}, said
            messages += [said.model_dump(), {"role": "tool", "tool_call_id": call.id,
                                             "content": weather("Oslo")}]
            last = litellm.completion(messages=messages, **ask).choices[0].message
            assert last.content == ANSWER, last
            m.check(route)


if __name__ == "__main__":
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    main(globals())
