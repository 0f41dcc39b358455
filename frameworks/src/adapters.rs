//! Layers that get adapters, as PEFT and torchtune name them.

use crate::tree::{Node, Value};
use regex::Regex;

/// Paths of the list of blocks in transformers' models, both text-only and multimodal ones.
const BLOCKS: [&str; 5] = [
    "model.layers",
    "model.language_model.layers",
    "language_model.model.layers",
    "model.text_model.layers",
    "transformer.h",
];
/// Linear layers of a block in transformers' models, grouped by the module that holds them.
const LAYERS: [(&str, &[&str]); 6] = [
    (
        "self_attn",
        &[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "qkv_proj",
            "out_proj",
            "q_a_proj",
            "q_b_proj",
            "kv_a_proj_with_mqa",
            "kv_b_proj",
        ],
    ),
    (
        "mlp",
        &[
            "gate_proj",
            "up_proj",
            "down_proj",
            "gate_up_proj",
            "fc1",
            "fc2",
        ],
    ),
    ("mlp.shared_expert", &["gate_proj", "up_proj", "down_proj"]),
    ("mlp.shared_experts", &["gate_proj", "up_proj", "down_proj"]),
    ("attn", &["c_attn", "c_proj"]),
    ("attention", &["query_key_value", "dense"]),
];
/// Number of blocks that a regular expression is matched against.
const TRIED: usize = 128;
/// Characters that show that a text is a regular expression, not a list of names.
const OF_EXPRESSIONS: &[char] = &['\\', '(', '[', '^', '$', '|', '+', '?', '{'];

/// Layers that get adapters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Targets {
    /// All linear layers of the blocks.
    AllLinear,
    /// Names, or suffixes of module paths.
    Named(Vec<String>),
}

impl Targets {
    /// Reads a list of names, a keyword for all layers, or a regular expression.
    ///
    /// # Errors
    /// Returns a message if the value has the wrong type or the expression matches no layer.
    pub(crate) fn of(node: &Node) -> Result<Self, String> {
        let words = node
            .words()
            .ok_or_else(|| node.expected("a list of layers"))?;
        if matches!(node.value, Value::Text(_)) && words.contains(OF_EXPRESSIONS) {
            return matching(&words);
        }
        let names: Vec<&str> = words.split([' ', ',']).filter(|w| !w.is_empty()).collect();
        Ok(match names.as_slice() {
            ["all" | "all-linear"] => Self::AllLinear,
            _ => Self::named(&names),
        })
    }

    /// Returns targets with these names.
    pub(crate) fn named(names: &[&str]) -> Self {
        Self::Named(names.iter().map(|&n| n.to_owned()).collect())
    }

    /// Adds the layers that another key names.
    pub(crate) fn join(self, other: &Self) -> Self {
        match (self, other) {
            (Self::Named(mut names), Self::Named(more)) => {
                let new: Vec<String> = more
                    .iter()
                    .filter(|n| !names.contains(n))
                    .cloned()
                    .collect();
                names.extend(new);
                Self::Named(names)
            }
            _ => Self::AllLinear,
        }
    }
}

/// Returns the layers whose full path matches an expression, like PEFT's `re.fullmatch`. For layers
/// that match in some blocks only, returns the end of their paths, starting at the block number.
fn matching(expression: &str) -> Result<Targets, String> {
    let whole = Regex::new(&format!("^(?:{expression})$"))
        .map_err(|_| format!("expected a regular expression, got `{expression}`"))?;
    let mut found = Vec::new();
    for (module, names) in LAYERS {
        for name in names {
            let end = format!("{module}.{name}");
            let in_block = |number: usize| {
                let path = |blocks: &&str| whole.is_match(&format!("{blocks}.{number}.{end}"));
                let blocks = BLOCKS.iter().find(|blocks| path(blocks))?;
                let list = blocks.rsplit('.').next()?;
                Some(format!("{list}.{number}.{end}"))
            };
            let some: Vec<String> = (0..TRIED).filter_map(in_block).collect();
            match some.len() {
                TRIED => found.push(end),
                _ => found.extend(some),
            }
        }
    }
    if found.is_empty() {
        return Err(format!(
            "`{expression}` matches no linear layer of a block, such as `model.layers.0.self_attn.q_proj`"
        ));
    }
    Ok(Targets::Named(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(expression: &str) -> Result<Vec<String>, String> {
        matching(expression).map(|t| match t {
            Targets::Named(names) => names,
            Targets::AllLinear => panic!("an expression has names"),
        })
    }

    #[test]
    fn an_expression_names_the_layers_that_it_matches_in_every_block() {
        let all = r"model.language_model.layers.[\d]+.(_checkpoint_wrapped_module.)?(mlp|self_attn).(up|down|gate|q|k|v|o)_proj";
        assert_eq!(
            names(all).unwrap(),
            [
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "self_attn.o_proj",
                "mlp.gate_proj",
                "mlp.up_proj",
                "mlp.down_proj",
            ]
        );
        assert_eq!(
            names(r".*\.self_attn\.(q|v)_proj").unwrap(),
            ["self_attn.q_proj", "self_attn.v_proj"]
        );
    }

    #[test]
    fn an_expression_may_name_layers_of_some_blocks() {
        let some = names(r".*\.layers\.(3|7)\.self_attn\.(q|v)_proj|.*\.mlp\.up_proj").unwrap();
        let ends = [
            "3.self_attn.q_proj",
            "7.self_attn.q_proj",
            "3.self_attn.v_proj",
        ];
        let wanted = ends.map(|end| format!("layers.{end}"));
        assert_eq!(some[..3], wanted);
        assert_eq!(some[3..], ["layers.7.self_attn.v_proj", "mlp.up_proj"]);
        assert_eq!(
            names(r"transformer\.h\.1\.attn\.c_attn").unwrap(),
            ["h.1.attn.c_attn"]
        );
    }

    #[test]
    fn an_expression_for_no_block_is_refused() {
        let none = names(r"vision_tower\..*").unwrap_err();
        assert!(none.contains("matches no linear layer"), "{none}");
        assert!(names("(").unwrap_err().contains("a regular expression"));
    }

    #[test]
    fn keys_add_up() {
        let q = Targets::named(&["q_proj"]);
        let joined = q.clone().join(&Targets::named(&["o_proj"]));
        assert_eq!(joined, Targets::named(&["q_proj", "o_proj"]));
        assert_eq!(q.join(&Targets::AllLinear), Targets::AllLinear);
    }
}
