// Fused float32 operators for decode steps of a few rows on a CPU: plain C interface, no dependency.
//
// Every result element is computed in one fixed order that does not depend on the number of rows, so a row of a verified
// block gets the same bits as the same row alone.

#include <cmath>
#include <cstdint>
#include <cstring>

typedef float v16 __attribute__((vector_size(64), aligned(4)));
typedef uint16_t bf16;

static inline v16 load(const float* p) { return *reinterpret_cast<const v16*>(p); }

// The 32 weights of one k: rows 0 .. 15 of a panel, and 16 .. 31.
static inline void load_rows(const float* p, v16& low, v16& high) {
  low = load(p);
  high = load(p + 16);
}

// A bfloat16 is the upper half of a float32. Rows i and i + 16 lie side by side: two operations widen both.
static inline void load_rows(const bf16* p, v16& low, v16& high) {
  typedef uint32_t u16 __attribute__((vector_size(64), aligned(2), may_alias));
  u16 pair = *reinterpret_cast<const u16*>(p);
  low = (v16)(pair << 16);
  high = (v16)(pair & 0xffff0000u);
}

static inline float lane_sum(v16 v) {
  typedef float v8 __attribute__((vector_size(32)));
  typedef float v4 __attribute__((vector_size(16)));
  v8 half[2];
  __builtin_memcpy(half, &v, sizeof(v));
  v8 eight = half[0] + half[1];
  v4 quarter[2];
  __builtin_memcpy(quarter, &eight, sizeof(eight));
  v4 four = quarter[0] + quarter[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

static inline void store(float* p, v16 v) { *reinterpret_cast<v16*>(p) = v; }

// One panel of 32 weight rows, [k][32], against T rows of x. Lanes are weight rows, so nothing is summed across lanes; even
// and odd k have sums of their own, which gives one row of x enough independent work.
template <int T, typename W>
static void panel(const float* x, const W* w, float* y, long n, long k) {
  v16 sum[2][T][2] = {};
  for (long i = 0; i < k; i += 2, w += 64) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
      v16 low, high;
      load_rows(w + odd * 32, low, high);
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        float value = x[t * k + i + odd];
        sum[odd][t][0] += value * low;
        sum[odd][t][1] += value * high;
      }
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) {
    store(y + t * n, sum[0][t][0] + sum[1][t][0]);
    store(y + t * n + 16, sum[0][t][1] + sum[1][t][1]);
  }
}

// All rows against one panel, at most six at a time: the panel comes from memory once and then from the first-level cache.
template <typename W>
static void rows_times_panel(const float* x, const W* w, float* y, long t, long n, long k) {
  while (t > 0) {
    long rows = t <= 6 ? t : (t < 12 ? (t + 1) / 2 : 6);
    switch (rows) {
      case 1: panel<1>(x, w, y, n, k); break;
      case 2: panel<2>(x, w, y, n, k); break;
      case 3: panel<3>(x, w, y, n, k); break;
      case 4: panel<4>(x, w, y, n, k); break;
      case 5: panel<5>(x, w, y, n, k); break;
      default: panel<6>(x, w, y, n, k); break;
    }
    x += rows * k;
    y += rows * n;
    t -= rows;
  }
}

template <typename W>
static void linear(const float* x, const W* w, float* y, long t, long n, long k) {
  for (long p = 0; p < n; p += 32) rows_times_panel(x, w + p * k, y + p, t, n, k);
}

// y[t, n] = sum over k of x[t, k] * w[n, k]; w in panels of 32 rows; n % 32 == 0, k % 2 == 0.
extern "C" void sgl_linear(const float* x, const float* w, float* y, long t, long n, long k) { linear(x, w, y, t, n, k); }

// The same over bfloat16 weights, rows i and i + 16 of a panel side by side.
extern "C" void sgl_linear_bf16(const float* x, const bf16* w, float* y, long t, long n, long k) {
  linear(x, w, y, t, n, k);
}

static inline float inverse_rms(const float* x, long d, float eps) {
  v16 sum = {};
  for (long i = 0; i < d; i += 16) {
    v16 value = load(x + i);
    sum += value * value;
  }
  return 1.0f / std::sqrt(lane_sum(sum) / d + eps);
}

// y = rmsnorm(x) * w (+ residual), [rows, d]; w [d]; residual may be null; d % 16 == 0.
extern "C" void sgl_rmsnorm(const float* x, const float* w, const float* residual, float* y, long rows, long d, float eps) {
  for (long r = 0; r < rows; r++, x += d, y += d) {
    float scale = inverse_rms(x, d, eps);
    if (residual) {
      for (long i = 0; i < d; i++) y[i] = residual[i] + x[i] * scale * w[i];
      residual += d;
    } else {
      for (long i = 0; i < d; i++) y[i] = x[i] * scale * w[i];
    }
  }
}

// Heads of one token: the first `rotated` of `heads` are normed with weights w [rotated, d] and rotated by cos / signed sin
// [rows, d]; `values` heads from `value_first` on are normed only.
extern "C" void sgl_head_norm_rope(const float* x, const float* w, const float* cos, const float* sin, float* out,
                                   float* value_out, long rows, long heads, long rotated, long value_first, long values,
                                   long d, float eps) {
  long half = d / 2;
  for (long r = 0; r < rows; r++, x += heads * d, cos += d, sin += d) {
    for (long h = 0; h < rotated; h++, out += d) {
      const float* head = x + h * d;
      const float* weight = w + h * d;
      float scale = inverse_rms(head, d, eps);
      for (long i = 0; i < half; i++) {
        float a = head[i] * scale * weight[i], b = head[i + half] * scale * weight[i + half];
        out[i] = a * cos[i] + b * sin[i];
        out[i + half] = b * cos[i + half] + a * sin[i + half];
      }
    }
    for (long h = 0; h < values; h++, value_out += d) {
      const float* head = x + (value_first + h) * d;
      float scale = inverse_rms(head, d, eps);
      for (long i = 0; i < d; i++) value_out[i] = head[i] * scale;
    }
  }
}

// cos and signed sin [rows, 2 * half] of positions * inv_freq; the first half of the sine is negated.
extern "C" void sgl_rope_tables(const long* positions, const float* inv_freq, float* cos, float* sin, long rows,
                                long half) {
  for (long r = 0; r < rows; r++, cos += 2 * half, sin += 2 * half) {
    float position = static_cast<float>(positions[r]);
    for (long i = 0; i < half; i++) {
      float angle = position * inv_freq[i];
      cos[i] = std::cos(angle);
      sin[i + half] = std::sin(angle);
    }
    for (long i = 0; i < half; i++) {
      cos[i + half] = cos[i];
      sin[i] = -sin[i + half];
    }
  }
}

static inline float gelu_tanh(float x) {
  // 0.5 * (1 + tanh(z)) is the logistic function of 2 z, which loses nothing to cancellation
  float z = -1.5957691216057308f * (x + 0.044715f * x * x * x);
  z = z > 80.0f ? 80.0f : (z < -80.0f ? -80.0f : z);
  return x / (1.0f + std::exp(z));
}

// y [rows, d] = gelu_tanh(gate) * up; gate and up are rows of width d, `gate_stride` and `up_stride` apart.
extern "C" void sgl_gelu_mul(const float* gate, const float* up, float* y, long rows, long d, long gate_stride,
                             long up_stride) {
  for (long r = 0; r < rows; r++, gate += gate_stride, up += up_stride, y += d)
    for (long i = 0; i < d; i++) y[i] = gelu_tanh(gate[i]) * up[i];
}

// One query row of G heads that share a KV head, against keys lo .. hi of its request.
template <int G>
static void attend(const float* q, const float* key, const float* value, const int* slots, float* out, float* scores,
                   long keys, long kv_stride, long d) {
  for (long j = 0; j < keys; j++) {
    const float* k = key + slots[j] * kv_stride;
    v16 sum[G] = {};
    for (long i = 0; i < d; i += 16) {
      v16 part = load(k + i);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) sum[g] += part * load(q + g * d + i);
    }
    for (int g = 0; g < G; g++) scores[g * keys + j] = lane_sum(sum[g]);
  }
  float scale[G];
  for (int g = 0; g < G; g++) {
    float* s = scores + g * keys;
    float best = s[0], total = 0.0f;
    for (long j = 1; j < keys; j++) best = s[j] > best ? s[j] : best;
    for (long j = 0; j < keys; j++) s[j] = std::exp(s[j] - best);
    for (long j = 0; j < keys; j++) total += s[j];
    scale[g] = 1.0f / total;
  }
  for (long i = 0; i < d; i += 16) {
    v16 sum[G] = {};
    for (long j = 0; j < keys; j++) {
      v16 part = load(value + slots[j] * kv_stride + i);
#pragma GCC unroll 4
      for (int g = 0; g < G; g++) sum[g] += scores[g * keys + j] * part;
    }
    for (int g = 0; g < G; g++) store(out + g * d + i, sum[g] * scale[g]);
  }
}

// Paged attention of `q_len` query rows for each of `batch` requests; softmax scale 1; d % 16 == 0.
// q: rows `q_stride` apart, each [heads, d]; key, value: [slots, kv_heads, d]; req_to_token[req_rows[b] * row_len + p]:
// slot of position p, for p < lens[b]. A row at position p sees positions <= p, and > p - window unless window is 0.
// tree: null, or [batch, q_len, q_len]: the keys of a request's last q_len positions are seen where it is not 0, in order.
// scratch: at least 4 * max(lens) floats; seen: at least max(lens) ints with a tree; out [batch * q_len, heads, d].
extern "C" void sgl_attention(const float* q, const float* key, const float* value, const int* req_to_token,
                              const long* req_rows, const long* lens, const long* positions,
                              const unsigned char* tree, float* out, float* scratch, int* seen, long batch, long q_len,
                              long heads, long kv_heads, long d, long q_stride, long row_len, long window) {
  long ratio = heads / kv_heads, step = ratio % 4 == 0 ? 4 : (ratio % 2 == 0 ? 2 : 1), kv_stride = kv_heads * d;
  for (long row = 0; row < batch * q_len; row++, q += q_stride, out += heads * d) {
    long b = row / q_len, position = positions[row], low = 0, high = position + 1;
    if (window && position - window + 1 > 0) low = position - window + 1;
    if (high > lens[b]) high = lens[b];
    const int* first = req_to_token + req_rows[b] * row_len + low;
    if (tree) {  // the slots of what the row sees, one after the other, as if they had been so in the table
      long prefix = lens[b] - q_len - low;
      prefix = prefix < 0 ? 0 : prefix;
      for (long j = 0; j < prefix; j++) seen[j] = first[j];
      const int* nodes = req_to_token + req_rows[b] * row_len + lens[b] - q_len;
      high = low + prefix;
      for (long j = 0; j < q_len; j++)
        if (tree[row * q_len + j]) seen[high++ - low] = nodes[j];
      first = seen;
    }
    for (long h = 0; h < heads; h += step) {
      const float *k = key + h / ratio * d, *v = value + h / ratio * d;
      switch (step) {
        case 4: attend<4>(q + h * d, k, v, first, out + h * d, scratch, high - low, kv_stride, d); break;
        case 2: attend<2>(q + h * d, k, v, first, out + h * d, scratch, high - low, kv_stride, d); break;
        default: attend<1>(q + h * d, k, v, first, out + h * d, scratch, high - low, kv_stride, d); break;
      }
    }
  }
}

template <typename W>
static void linear_groups(const float* x, const W* w, const long* groups, float* y, long batch, long count, long per,
                          long k) {
  for (long b = 0; b < batch; b++, x += k)
    for (long i = 0; i < count; i++, y += per) linear(x, w + groups[b * count + i] * per * k, y, 1, per, k);
}

// y[b, i * per .. ] = rows of group groups[b * count + i] of w, times x[b]; w in panels of 32 rows, `per` rows a group.
extern "C" void sgl_linear_groups(const float* x, const float* w, const long* groups, float* y, long batch, long count,
                                  long per, long k) {
  linear_groups(x, w, groups, y, batch, count, per, k);
}

extern "C" void sgl_linear_groups_bf16(const float* x, const bf16* w, const long* groups, float* y, long batch,
                                       long count, long per, long k) {
  linear_groups(x, w, groups, y, batch, count, per, k);
}

// x = cap * tanh(x / cap), in place.
extern "C" void sgl_softcap(float* x, long n, float cap) {
  float scale = 2.0f / cap;
  for (long i = 0; i < n; i++) {
    float z = x[i] * scale;
    z = z > 80.0f ? 80.0f : (z < -80.0f ? -80.0f : z);
    x[i] = cap - 2.0f * cap / (std::exp(z) + 1.0f);
  }
}

// sum = residual + rmsnorm(x) * w, then y = rmsnorm(sum) * next_w; [rows, d].
extern "C" void sgl_rmsnorm_add_rmsnorm(const float* x, const float* w, const float* residual, const float* next_w,
                                        float* sum, float* y, long rows, long d, float eps) {
  sgl_rmsnorm(x, w, residual, sum, rows, d, eps);
  sgl_rmsnorm(sum, next_w, nullptr, y, rows, d, eps);
}

// Of each row of x [rows, n] the largest element and the lowest index that has it.
extern "C" void sgl_argmax(const float* x, float* values, long* ids, long rows, long n) {
  for (long r = 0; r < rows; r++, x += n) {
    float best = x[0];
    for (long i = 1; i < n; i++) best = x[i] > best ? x[i] : best;
    long at = 0;
    while (x[at] != best && at < n - 1) at++;
    values[r] = best;
    ids[r] = at;
  }
}

// Chains of n tokens that were verified, [batch, n], rows `draft_row` and n apart: how many tokens each gains, and what
// that changes. forced, limits: null, or [batch], as in sgl_kernel.decode_step; result [batch, n + 1], `result_row` apart.
extern "C" void sgl_accept_chain(const long* drafts, const long* targets, const long* live, const long* forced,
                                 const long* limits, long* committed, long* bonus, long* result, const float* hidden,
                                 float* states, long batch, long n, long width, long draft_row, long result_row) {
  for (long b = 0; b < batch; b++, drafts += draft_row, targets += n, result += result_row, hidden += n * width) {
    long length = 1;
    while (length < n && drafts[length] == targets[length - 1]) length++;
    if (forced) length = forced[b];
    if (limits && length > limits[b] + 1) length = limits[b] + 1;
    length = length < 1 ? 1 : (length > n ? n : length);
    std::memcpy(result, targets, n * sizeof(long));
    result[n] = length;
    bonus[b] = targets[length - 1];
    committed[b] += length * live[b];
    std::memcpy(states + b * width, hidden + (length - 1) * width, width * sizeof(float));
  }
}

// A weight in panels: float32, or bfloat16 where `narrow`. Null where a layer has none.
struct Weight {
  const void* panels;
  long n, k, narrow;
};

static void product(const float* x, const Weight& w, float* y, long t) {
  if (w.narrow)
    linear(x, static_cast<const bf16*>(w.panels), y, t, w.n, w.k);
  else
    linear(x, static_cast<const float*>(w.panels), y, t, w.n, w.k);
}

// What a layer is; `scale` is its scalar, `next_norm` the norm that comes after it. A layer that does not own KV has
// `values` 0. `rope`: which of the step's tables it takes.
struct Layer {
  Weight qkv, o, gate_up, down, ple_gate, ple_projection;
  const float *head_weights, *post_attention_norm, *pre_mlp_norm, *post_mlp_norm, *post_ple_norm, *next_norm, *scale;
  float *key, *value;
  long heads, heads_in, rotated, values, kv_heads, d, window, rope;
};

// What a step brings. x, normed [rows, hidden]: the residual stream, and the same through the first norm; both are changed
// to what the last layer leaves. ple [layers, rows, width], layers and rows `ple_layer` and `ple_row` apart; cos, sin: a
// pair for each kind of layer; locs [rows]: slots.
struct Step {
  float *x, *normed;
  const float *ple, *cos[2], *sin[2];
  const long *locs, *req_rows, *lens, *positions;
  const int* req_to_token;
  const unsigned char* tree;
  float *scratch, *attention_scratch;
  int* seen;
  long ple_layer, ple_row, rows, batch, hidden, row_len;
};

// All layers over a few rows. scratch: rows * (2 * widest product + 2 * hidden) floats; the others as in sgl_attention.
extern "C" void sgl_decoder_layers(const Layer* layers, long count, const Step* step, long widest, float eps) {
  const Step& s = *step;
  long t = s.rows, hidden = s.hidden;
  float *wide = s.scratch, *act = wide + t * widest, *out = act + t * widest, *sum = out + t * hidden;
  for (long i = 0; i < count; i++) {
    const Layer& l = layers[i];
    long kv_width = l.kv_heads * l.d, queries = l.heads * l.d, stride = l.rotated * l.d;
    product(s.normed, l.qkv, wide, t);
    float* values = act + t * stride;
    sgl_head_norm_rope(wide, l.head_weights, s.cos[l.rope], s.sin[l.rope], act, values, t, l.heads_in, l.rotated,
                       l.heads_in - l.values, l.values, l.d, eps);
    for (long r = 0; l.values && r < t; r++) {
      std::memcpy(l.key + s.locs[r] * kv_width, act + r * stride + queries, kv_width * sizeof(float));
      std::memcpy(l.value + s.locs[r] * kv_width, values + r * kv_width, kv_width * sizeof(float));
    }
    sgl_attention(act, l.key, l.value, s.req_to_token, s.req_rows, s.lens, s.positions, s.tree, wide,
                  s.attention_scratch, s.seen, s.batch, t / s.batch, l.heads, l.kv_heads, l.d, stride, s.row_len,
                  l.window);
    product(wide, l.o, out, t);
    sgl_rmsnorm_add_rmsnorm(out, l.post_attention_norm, s.x, l.pre_mlp_norm, sum, s.normed, t, hidden, eps);
    product(s.normed, l.gate_up, wide, t);
    long width = l.gate_up.n / 2;
    sgl_gelu_mul(wide, wide + width, act, t, width, 2 * width, 2 * width);
    product(act, l.down, out, t);
    const float* norm = l.post_mlp_norm;
    if (l.ple_gate.panels) {
      long part = l.ple_gate.n;
      sgl_rmsnorm(out, norm, sum, s.x, t, hidden, eps);
      product(s.x, l.ple_gate, wide, t);
      sgl_gelu_mul(wide, s.ple + i * s.ple_layer, act, t, part, part, s.ple_row);
      product(act, l.ple_projection, out, t);
      std::memcpy(sum, s.x, t * hidden * sizeof(float));
      norm = l.post_ple_norm;
    }
    sgl_rmsnorm(out, norm, sum, s.x, t, hidden, eps);
    for (long j = 0; j < t * hidden; j++) s.x[j] *= *l.scale;
    sgl_rmsnorm(s.x, l.next_norm, nullptr, s.normed, t, hidden, eps);
  }
}

// The rest of an assistant: what is before and behind its layers. embed [vocab, backbone]; the head's tokens in clusters
// of `per`, cluster c being rows c * per and on; ordering names the token of each row.
struct Assistant {
  const float *embed, *first_norm, *inv_freq[2];
  Weight pre, post, centroids, head;
  const long* ordering;
  long backbone, half[2], per, top_k;
  float embed_scale;
};

// Of `count` scores the `top` best, best first; of equal ones the earlier. Overwrites those it takes.
static void take_best(float* scores, long count, long top, long* best) {
  for (long i = 0; i < top; i++) {
    long at = 0;
    for (long j = 1; j < count; j++)
      if (scores[j] > scores[at]) at = j;
    best[i] = at;
    scores[at] = -3.4e38f;
  }
}

static long best_of_clusters(const float* x, const Assistant& a, float* scores, long* clusters) {
  product(x, a.centroids, scores, 1);
  take_best(scores, a.centroids.n, a.top_k, clusters);
  long token = 0;
  float best = -3.4e38f;
  for (long i = 0; i < a.top_k; i++) {
    Weight cluster = a.head;
    cluster.n = a.per;
    cluster.panels = static_cast<const char*>(a.head.panels) + clusters[i] * a.per * a.head.k * (a.head.narrow ? 2 : 4);
    product(x, cluster, scores, 1);
    for (long j = 0; j < a.per; j++)
      if (scores[j] > best) best = scores[j], token = a.ordering[clusters[i] * a.per + j];
  }
  return token;
}

// A chain of `steps` drafts for each of `step->batch` requests, one row each: tokens [batch, steps + 1], whose first column
// is there, and hidden [batch, backbone] at first. step->x, normed, cos and sin are room that this fills; beside holds
// 2 * backbone floats a row, scores as many as there are centroids or tokens in a cluster, clusters top_k.
extern "C" void sgl_draft_chain(const Layer* layers, long count, const Step* step, long widest, float eps,
                                const Assistant* assistant, float* hidden, long* tokens, long steps, float* beside,
                                float* scores, long* clusters) {
  const Assistant& a = *assistant;
  const Step& s = *step;
  for (int kind = 0; kind < 2; kind++)
    sgl_rope_tables(s.positions, a.inv_freq[kind], const_cast<float*>(s.cos[kind]), const_cast<float*>(s.sin[kind]),
                    s.rows, a.half[kind]);
  for (long i = 0; i < steps; i++) {
    for (long r = 0; r < s.rows; r++) {
      const float* embedding = a.embed + tokens[r * (steps + 1) + i] * a.backbone;
      float* row = beside + r * 2 * a.backbone;
      for (long j = 0; j < a.backbone; j++) row[j] = embedding[j] * a.embed_scale;
      std::memcpy(row + a.backbone, hidden + r * a.backbone, a.backbone * sizeof(float));
    }
    product(beside, a.pre, s.x, s.rows);
    sgl_rmsnorm(s.x, a.first_norm, nullptr, s.normed, s.rows, s.hidden, eps);
    sgl_decoder_layers(layers, count, step, widest, eps);
    product(s.normed, a.post, hidden, s.rows);
    for (long r = 0; r < s.rows; r++)
      tokens[r * (steps + 1) + i + 1] = best_of_clusters(s.normed + r * s.hidden, a, scores, clusters);
  }
}
