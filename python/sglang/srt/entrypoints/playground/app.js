// The chat: settings to requests, answers to the conversation.

import { Answer, DEEPEST_SHADE } from "./answer.js";
import { ApiError, serverInfo, streamChat } from "./api.js";

const $ = (id) => document.getElementById(id);
const settings = $("settings");
const prompt = $("prompt");
const log = $("log");

const MODE_NOTES = {
  on: "The assistant model drafts, the model verifies.",
  off: "One token a round: what a server without speculation does.",
  compare: "The same prompt twice, one after the other: same text, another speed.",
};

let history = []; // messages, without the system prompt
let running = null; // AbortController of what is being answered
let server = null; // what /server_info says
let isAtEnd = true; // as the reader left it

function value(name) {
  return settings.elements[name].value;
}

function isChecked(name) {
  return settings.elements[name].checked;
}

/** The request as the settings have it, but for the switch of speculation. */
function requestBody() {
  const system = value("system").trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...history] : [...history],
    temperature: Number(value("temperature")),
    top_p: Number(value("top_p")),
    max_tokens: Number(value("max_tokens")),
    enable_thinking: isChecked("thinking"),
    stream_options: { include_usage: true },
    speculative_usage: true,
    return_accept_lens: true,
  };
  if (value("seed") !== "") body.seed = Number(value("seed"));
  return body;
}

async function runAnswer(answer, body) {
  let outcome = "done";
  try {
    for await (const event of streamChat(body, value("key"), running.signal)) {
      answer.take(event);
      showLive(answer.figures);
      followEnd();
    }
  } catch (error) {
    if (running.signal.aborted) outcome = "stopped";
    else if (error instanceof ApiError || error instanceof TypeError) outcome = error;
    else throw error;
  } finally {
    answer.end(outcome);
    showLive(answer.figures);
  }
  return outcome;
}

/** Ask, and show what comes; returns how the last answer ended. */
async function send(text) {
  const mode = value("mode");
  const chat = history; // stays that of this chat when a new one is begun meanwhile
  isAtEnd = true;
  $("empty").hidden = true;
  append("article", "message user", text);
  chat.push({ role: "user", content: text });
  const group = append("article", `message model${mode === "compare" ? " pair-of-answers" : ""}`);
  const body = requestBody();
  // two draws are only the same with the same seed
  if (mode === "compare") body.seed ??= crypto.getRandomValues(new Uint32Array(1))[0];
  setRunning(new AbortController());
  const answers = [];
  let outcome = "done";
  try {
    // one after the other: side by side they would share the machine, and neither speed would be its own
    for (const speculative of mode === "compare" ? [true, false] : [mode === "on"]) {
      const answer = new Answer(`Speculation ${speculative ? "on" : "off"}`);
      answers.push(answer);
      group.append(answer.element);
      followEnd();
      outcome = await runAnswer(answer, { ...body, speculative });
      if (outcome !== "done") break;
    }
  } finally {
    setRunning(null);
  }
  const complete = answers.filter((answer) => answer.finishReason !== null);
  if (complete.length === 2) showVerdict(group, ...complete);
  if (answers[0].content) chat.push({ role: "assistant", content: answers[0].content });
  else chat.pop();
  followEnd();
  return outcome;
}

function showVerdict(group, on, off) {
  const same = on.content === off.content;
  const verdict = document.createElement("p");
  verdict.className = `verdict ${same ? "same" : "different"}`;
  verdict.setAttribute("role", "status");
  const parts = [same ? "Identical text" : "The texts differ"];
  if (!same && server?.speculative_use_rejection_sampling) parts.push("this server draws its drafts");
  if (on.figures.rate && off.figures.rate) {
    parts.push(`${(on.figures.rate / off.figures.rate).toFixed(2)} × the speed with speculation`);
  }
  verdict.textContent = parts.join(" · ");
  group.append(verdict);
}

function append(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  log.append(element);
  return element;
}

function showLive(figures) {
  for (const [name, text] of Object.entries(figures.shown())) {
    document.querySelector(`[data-figure="${name}"]`).textContent = text;
  }
}

/** Keep the end in view, unless the reader has scrolled away from it. */
function followEnd() {
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function setRunning(controller) {
  running = controller;
  log.setAttribute("aria-busy", String(controller !== null));
  $("send").hidden = controller !== null;
  $("stop").hidden = controller === null;
}

function askForKey() {
  showSettings(true);
  $("key").focus();
}

function showSettings(open) {
  settings.classList.toggle("open", open);
  $("open-settings").setAttribute("aria-expanded", String(open));
}

async function showServer() {
  const model = $("model");
  try {
    server = await serverInfo(value("key"));
  } catch (error) {
    model.textContent = error.status === 401 ? "enter the API key in the settings" : error.message;
    return;
  }
  const most = server.spec?.adaptive ? "up to " : "";
  const spec = server.spec ? `${server.spec.algorithm}, ${most}${server.spec.num_steps} drafts a round` : "no speculation";
  model.textContent = `${server.served_model_name ?? server.model_path} · ${spec}`;
  drawScale(server.spec ? server.spec.num_draft_tokens : 1);
}

function drawScale(length) {
  const steps = Array.from({ length: Math.min(length, DEEPEST_SHADE + 1) }, (_, place) => {
    const step = document.createElement("li");
    step.className = `place-${place}`;
    step.textContent = place === DEEPEST_SHADE ? `${place + 1}+` : String(place + 1);
    return step;
  });
  $("scale").replaceChildren(...steps);
}

function showSettingsValues() {
  $("temperature-value").textContent = value("temperature");
  $("top-p-value").textContent = value("top_p");
  $("mode-note").textContent = MODE_NOTES[value("mode")];
  log.classList.toggle("shaded", isChecked("shade"));
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

async function submit() {
  const text = prompt.value.trim();
  if (!text || running || !settings.reportValidity()) return;
  prompt.value = "";
  fitPrompt();
  showSettings(false);
  const outcome = await send(text);
  if (outcome.status === 401) askForKey();
  else prompt.focus();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
prompt.addEventListener("input", fitPrompt);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
log.addEventListener("scroll", () => {
  isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
});
$("stop").addEventListener("click", () => running?.abort());
$("new-chat").addEventListener("click", () => {
  running?.abort();
  history = [];
  log.replaceChildren($("empty"));
  $("empty").hidden = false;
  prompt.focus();
});
$("examples").addEventListener("click", (event) => {
  if (event.target instanceof HTMLButtonElement && !running) {
    prompt.value = event.target.textContent;
    submit();
  }
});
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = getComputedStyle(root).colorScheme === "dark" ||
    (!root.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  root.dataset.theme = isDark ? "light" : "dark";
});
$("open-settings").addEventListener("click", () => showSettings(!settings.classList.contains("open")));
settings.addEventListener("submit", (event) => event.preventDefault());
settings.addEventListener("input", showSettingsValues);
$("key").addEventListener("change", showServer);

drawScale(5);
showSettingsValues();
showServer();
