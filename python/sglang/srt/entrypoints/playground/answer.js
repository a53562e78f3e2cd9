// One answer as it grows: its tokens shaded by their place in the round, and its figures.

export const DEEPEST_SHADE = 7;

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const lengthOf = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

/** Counts and times of an answer, from the places of its tokens. The first token comes with the prompt, not in a round. */
class Figures {
  tokens = 0;
  roundLens = [];
  #sentAt = performance.now();
  #firstAt = null;
  #lastAt = null;

  add(place) {
    this.#lastAt = performance.now();
    this.#firstAt ??= this.#lastAt;
    this.tokens += 1;
    if (this.tokens === 1) return;
    if (place === 0) this.roundLens.push(0);
    this.roundLens[this.roundLens.length - 1] += 1;
  }

  get acceptLength() {
    return this.roundLens.length ? (this.tokens - 1) / this.roundLens.length : null;
  }

  get firstTokenMs() {
    return this.#firstAt === null ? null : this.#firstAt - this.#sentAt;
  }

  /** Tokens per second behind the first one; null before there are any. */
  get rate() {
    const seconds = (this.#lastAt - this.#firstAt) / 1000;
    return this.tokens > 1 && seconds > 0 ? (this.tokens - 1) / seconds : null;
  }

  shown() {
    const or = (value, format) => (value === null ? "–" : format.format(value));
    return {
      rate: or(this.rate, number),
      accept: or(this.acceptLength, lengthOf),
      tokens: number.format(this.tokens),
      rounds: number.format(this.roundLens.length),
    };
  }
}

export class Answer {
  figures = new Figures();
  content = "";
  finishReason = null;
  #root;
  #place = 0;

  /** `title`: what is said above the answer. */
  constructor(title) {
    const template = document.getElementById("answer-template");
    this.#root = template.content.cloneNode(true).firstElementChild;
    this.#root.setAttribute("aria-label", title);
    this.#part("h3").textContent = title;
  }

  get element() {
    return this.#root;
  }

  /** Take one chunk of the stream. */
  take(event) {
    for (const choice of event.choices) {
      for (const place of choice.accept_positions ?? []) {
        this.figures.add(place);
        this.#place = place;
      }
      this.finishReason = choice.finish_reason ?? this.finishReason;
      const { content, reasoning_content: thought } = choice.delta;
      if (thought) {
        this.#part(".thinking").hidden = false;
        this.#append(".thinking .text", thought);
      }
      if (content) {
        this.content += content;
        this.#append(".content", content);
      }
    }
    const thoughtTokens = event.usage?.reasoning_tokens;
    if (thoughtTokens) this.#part(".thinking summary").textContent = `Thinking, ${thoughtTokens} tokens`;
  }

  /** The answer is over, as `outcome` says: "done", "stopped", or an error. */
  end(outcome) {
    this.#root.classList.remove("growing");
    if (outcome instanceof Error) {
      const error = this.#part(".error");
      error.hidden = false;
      error.textContent = outcome.message;
    }
    if (this.figures.tokens === 0) return;
    this.#drawRounds();
    const { rate, accept, tokens, rounds } = this.figures.shown();
    const parts = [`${tokens} tokens in ${rounds} rounds`, `accept length ${accept}`, `${rate} tokens/s`];
    parts.push(`first token after ${number.format(this.figures.firstTokenMs)} ms`);
    if (outcome === "stopped") parts.push("stopped");
    if (this.finishReason === "length") parts.push("cut at the most tokens");
    this.#part(".figures").textContent = parts.join(" · ");
  }

  /** Space before a word is shaded only within a round, so that rounds stand apart. */
  #append(selector, text) {
    const round = this.figures.roundLens.length;
    const shade = `place-${Math.min(this.#place, DEEPEST_SHADE)}`;
    const [, space, rest] = /^(\s*)(.*)$/s.exec(text);
    const token = this.#span(`token ${shade}`, rest || space);
    token.title = round ? `round ${round}, token ${this.#place + 1}` : "with the prompt";
    token.dataset.round = round;
    if (rest && space) this.#part(selector).append(this.#span(this.#place ? `space ${shade}` : "", space));
    this.#part(selector).append(token);
  }

  #span(className, text) {
    const span = document.createElement("span");
    span.className = className;
    span.textContent = text;
    return span;
  }

  /** A bar for each round, as high as the tokens it brought. */
  #drawRounds() {
    const lens = this.figures.roundLens;
    if (lens.length === 0) return;
    const strip = this.#part(".rounds");
    strip.hidden = false;
    strip.setAttribute("aria-label", `Tokens of each round: ${lens.join(", ")}`);
    const highest = Math.max(...lens, 4);
    for (const length of lens) {
      const bar = document.createElement("i");
      bar.className = `place-${Math.min(length - 1, DEEPEST_SHADE)}`;
      bar.style.height = `${(100 * length) / highest}%`;
      strip.append(bar);
    }
  }

  #part(selector) {
    return this.#root.querySelector(selector);
  }
}
