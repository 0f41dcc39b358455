//! `config.json`.

use crate::train::TrainError;
use serde_json::{Value, json};
use shardlab_plan::config::{Bias, Family, Model};
use std::path::Path;

/// Name of a llama variant in transformers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Llama,
    /// Whether its query, key and value projections always have biases.
    Qwen2,
    /// Whether its queries and keys are normalized.
    Qwen3,
}

impl Kind {
    /// Name of the variant; `None` if no variant has these features.
    fn of(m: &Model) -> Option<Self> {
        match (m.bias, m.qk_norm) {
            (Bias::None | Bias::All, false) => Some(Self::Llama),
            (Bias::Qkv, false) => Some(Self::Qwen2),
            (Bias::None, true) => Some(Self::Qwen3),
            (Bias::Qkv | Bias::All, true) => None,
        }
    }

    fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Llama => ("LlamaForCausalLM", "llama"),
            Self::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
            Self::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
        }
    }
}

fn of_llama(m: &Model, kind: Kind) -> Value {
    let (architecture, name) = kind.names();
    let mut config = json!({
        "architectures": [architecture],
        "model_type": name,
        "vocab_size": m.vocab,
        "hidden_size": m.hidden,
        "intermediate_size": m.ffn,
        "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_heads,
        "head_dim": m.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": m.max_seq_len,
        "rms_norm_eps": m.norm_eps,
        "rope_theta": m.rope_theta,
    });
    if kind != Kind::Llama {
        config["use_sliding_window"] = json!(false);
    }
    if kind != Kind::Qwen2 {
        config["attention_bias"] = json!(m.bias == Bias::All);
    }
    if kind == Kind::Llama {
        config["mlp_bias"] = json!(m.bias == Bias::All);
    }
    config["tie_word_embeddings"] = json!(m.tie_embeddings);
    config["torch_dtype"] = json!("float32");
    config
}

/// Returns the configuration of a model; `None` for families without one.
pub(crate) fn of(m: &Model) -> Option<Value> {
    match m.family {
        Family::Llama => Kind::of(m).map(|kind| of_llama(m, kind)),
        Family::Gpt2 => Some(json!({
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": m.vocab,
            "n_embd": m.hidden,
            "n_inner": m.ffn,
            "n_layer": m.layers,
            "n_head": m.heads,
            "n_positions": m.max_seq_len,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": m.norm_eps,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "tie_word_embeddings": m.tie_embeddings,
            "torch_dtype": "float32",
        })),
        Family::Encoder | Family::Linear | Family::Cnn => None,
    }
}

/// Collects differences.
struct Differences<'a> {
    config: &'a Value,
    all: Vec<String>,
}

impl Differences<'_> {
    /// Returns the value of a key that is present and not null.
    fn get(&self, key: &str) -> Option<&Value> {
        self.config.get(key).filter(|v| !v.is_null())
    }

    /// Compares a number, whose default is `default`.
    fn number(&mut self, key: &str, default: f64, path: &str, ours: f64) {
        let theirs = self.get(key).map_or(Some(default), Value::as_f64);
        self.same(key, theirs, path, ours);
    }

    fn same(&mut self, key: &str, theirs: Option<f64>, path: &str, ours: f64) {
        // Configurations and scenarios both contain decimal literals, so equal settings parse to
        // equal numbers.
        if theirs != Some(ours) {
            let theirs = theirs.map_or_else(|| "no number".to_owned(), |v| v.to_string());
            self.all.push(format!("`{key}` is {theirs}, {path} {ours}"));
        }
    }

    fn flag(&mut self, key: &str, default: bool, path: &str, ours: bool) {
        let theirs = self.get(key).map_or(Some(default), Value::as_bool);
        if theirs != Some(ours) {
            self.all.push(format!("`{key}` is not {path} = {ours}"));
        }
    }

    fn word(&mut self, key: &str, default: &str, allowed: &[&str]) {
        let theirs = self.get(key).map_or(Some(default), Value::as_str);
        if !theirs.is_some_and(|t| allowed.contains(&t)) {
            let theirs = self.get(key).map(ToString::to_string).unwrap_or_default();
            self.all.push(format!(
                "`{key}` is {theirs}; known is {}",
                allowed.join(" or ")
            ));
        }
    }
}

/// Compares a configuration with the scenario's model.
pub(crate) fn check(
    path: &Path,
    config: &Value,
    m: &Model,
    seq_len: u64,
) -> Result<(), TrainError> {
    let mut d = Differences {
        config,
        all: Vec::new(),
    };
    match (m.family, Kind::of(m)) {
        (Family::Llama, Some(kind)) => llama(&mut d, m, kind, seq_len),
        (Family::Gpt2, _) => gpt2(&mut d, m),
        _ => return Err(TrainError::NoNames),
    }
    if d.all.is_empty() {
        return Ok(());
    }
    Err(TrainError::OtherModel {
        path: path.to_owned(),
        differences: d.all,
    })
}

fn llama(d: &mut Differences<'_>, m: &Model, kind: Kind, seq_len: u64) {
    let (vocab, ffn, head_dim) = match kind {
        Kind::Llama => (32_000.0, 11_008.0, m.hidden / m.heads),
        Kind::Qwen2 => (151_936.0, 22_016.0, m.hidden / m.heads),
        Kind::Qwen3 => (151_936.0, 22_016.0, 128),
    };
    let (_, name) = kind.names();
    d.word("model_type", name, &[name]);
    d.number("vocab_size", vocab, "model.vocab", m.vocab as f64);
    d.number("hidden_size", 4096.0, "model.hidden", m.hidden as f64);
    d.number("intermediate_size", ffn, "model.ffn", m.ffn as f64);
    d.number(
        "num_hidden_layers",
        32.0,
        "model.layers",
        f64::from(m.layers),
    );
    d.number("num_attention_heads", 32.0, "model.heads", m.heads as f64);
    d.number(
        "num_key_value_heads",
        m.heads as f64,
        "model.kv_heads",
        m.kv_heads as f64,
    );
    d.number(
        "head_dim",
        head_dim as f64,
        "model.head_dim",
        m.head_dim as f64,
    );
    d.number("rms_norm_eps", 1e-6, "model.norm_eps", m.norm_eps);
    d.word("hidden_act", "silu", &["silu"]);
    let slides = d.get("use_sliding_window").and_then(Value::as_bool);
    if kind != Kind::Llama && slides == Some(true) {
        d.all
            .push("`use_sliding_window` is true, but only full attention is supported".to_owned());
    }
    let all = m.bias == Bias::All;
    if kind != Kind::Qwen2 {
        d.flag("attention_bias", false, "model.bias", all);
    }
    if kind == Kind::Llama {
        d.flag("mlp_bias", false, "model.bias", all);
    }
    d.flag(
        "tie_word_embeddings",
        false,
        "model.tie_embeddings",
        m.tie_embeddings,
    );
    let rope = d
        .get("rope_parameters")
        .or_else(|| d.get("rope_scaling"))
        .cloned();
    let rope = rope.unwrap_or(Value::Null);
    let theta = rope.get("rope_theta").or_else(|| d.get("rope_theta"));
    let theta = theta.map_or(Some(10_000.0), Value::as_f64);
    d.same("rope_theta", theta, "model.rope_theta", m.rope_theta);
    let kind = rope.get("rope_type").or_else(|| rope.get("type"));
    if let Some(kind) = kind.filter(|k| *k != "default") {
        d.all
            .push(format!("`rope_type` is {kind}; known is \"default\""));
    }
    let longest = d.get("max_position_embeddings").and_then(Value::as_u64);
    if let Some(longest) = longest.filter(|n| *n < seq_len) {
        d.all.push(format!(
            "`max_position_embeddings` is {longest}, train.seq_len {seq_len}"
        ));
    }
}

fn gpt2(d: &mut Differences<'_>, m: &Model) {
    d.word("model_type", "gpt2", &["gpt2"]);
    d.number("vocab_size", 50257.0, "model.vocab", m.vocab as f64);
    d.number("n_embd", 768.0, "model.hidden", m.hidden as f64);
    d.number("n_inner", 4.0 * m.hidden as f64, "model.ffn", m.ffn as f64);
    d.number("n_layer", 12.0, "model.layers", f64::from(m.layers));
    d.number("n_head", 12.0, "model.heads", m.heads as f64);
    d.number(
        "n_positions",
        1024.0,
        "model.max_seq_len",
        m.max_seq_len as f64,
    );
    d.number("layer_norm_epsilon", 1e-5, "model.norm_eps", m.norm_eps);
    d.word(
        "activation_function",
        "gelu_new",
        &["gelu_new", "gelu_pytorch_tanh"],
    );
    d.flag(
        "tie_word_embeddings",
        true,
        "model.tie_embeddings",
        m.tie_embeddings,
    );
}
