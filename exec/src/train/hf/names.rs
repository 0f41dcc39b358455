//! Published names of parameters.

use shardlab_plan::Program;
use shardlab_plan::scenario::Family;

/// How a parameter is stored in published files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Name {
    pub(crate) name: String,
    /// Stored as `[in, out]` (gpt2's `Conv1D`).
    pub(crate) transposed: bool,
}

impl Name {
    /// Returns the shape in the file.
    pub(crate) fn stored_shape(&self, shape: &[u64]) -> Vec<u64> {
        let mut shape = shape.to_vec();
        if self.transposed {
            shape.reverse();
        }
        shape
    }
}

const LLAMA: &[(&str, &str)] = &[
    ("attention.norm", "input_layernorm"),
    ("attention.q", "self_attn.q_proj"),
    ("attention.k", "self_attn.k_proj"),
    ("attention.v", "self_attn.v_proj"),
    ("attention.o", "self_attn.o_proj"),
    ("attention.q_norm", "self_attn.q_norm"),
    ("attention.k_norm", "self_attn.k_norm"),
    ("mlp.norm", "post_attention_layernorm"),
    ("mlp.w1", "mlp.gate_proj"),
    ("mlp.w3", "mlp.up_proj"),
    ("mlp.w2", "mlp.down_proj"),
];

const GPT2: &[(&str, &str)] = &[
    ("attention.ln_1", "ln_1"),
    ("attention.c_attn", "attn.c_attn"),
    ("attention.c_proj", "attn.c_proj"),
    ("mlp.ln_2", "ln_2"),
    ("mlp.c_fc", "mlp.c_fc"),
    ("mlp.c_proj", "mlp.c_proj"),
];

/// Returns the names of all parameters of a program; `None` for families without names, and if a
/// parameter is unknown.
pub(crate) fn of(program: &Program, family: Family) -> Option<Vec<Name>> {
    program
        .params
        .iter()
        .map(|p| {
            let (module, leaf) = p.name.rsplit_once('.')?;
            let (name, conv) = match family {
                Family::Llama => (llama(module)?, false),
                Family::Gpt2 => gpt2(module)?,
                Family::Encoder | Family::Linear | Family::Cnn => return None,
            };
            Some(Name {
                name: format!("{name}.{leaf}"),
                transposed: conv && p.shape.len() == 2,
            })
        })
        .collect()
}

/// Splits `layers.N.rest` into the index and the rest.
fn layer(module: &str) -> Option<(&str, &str)> {
    module.strip_prefix("layers.")?.split_once('.')
}

fn lookup(table: &[(&str, &'static str)], part: &str) -> Option<&'static str> {
    table
        .iter()
        .find(|(ours, _)| *ours == part)
        .map(|(_, theirs)| *theirs)
}

fn llama(module: &str) -> Option<String> {
    Some(match module {
        "tok_embeddings" => "model.embed_tokens".to_owned(),
        "norm" => "model.norm".to_owned(),
        "output" => "lm_head".to_owned(),
        _ => {
            let (n, part) = layer(module)?;
            format!("model.layers.{n}.{}", lookup(LLAMA, part)?)
        }
    })
}

fn gpt2(module: &str) -> Option<(String, bool)> {
    Some(match module {
        "tok_embeddings.wte" => ("transformer.wte".to_owned(), false),
        "tok_embeddings.wpe" => ("transformer.wpe".to_owned(), false),
        "norm" => ("transformer.ln_f".to_owned(), false),
        "output" => ("lm_head".to_owned(), false),
        _ => {
            let (n, part) = layer(module)?;
            let theirs = lookup(GPT2, part)?;
            (
                format!("transformer.h.{n}.{theirs}"),
                !theirs.starts_with("ln_"),
            )
        }
    })
}

/// Returns whether a tensor of published files is not a weight.
pub(crate) fn ignorable(name: &str, tied: bool) -> bool {
    name.ends_with(".rotary_emb.inv_freq")
        || name.ends_with(".attn.bias")
        || name.ends_with(".attn.masked_bias")
        || tied && name == "lm_head.weight"
}
