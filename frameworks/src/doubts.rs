//! Finds keys that may change the answer to whether a job fits, although the prediction does not
//! follow them. They are reported next to the verdict, not only in the table of keys.

use crate::draft::Draft;
use crate::row::{DATA, Doubt, Lack, Row, Status, UNKNOWN, UNSET_VARIABLE};
use crate::table::{Effect, Engine, Fact, To};
use crate::tree::{Node, Value};
use shardlab_plan::scenario::Position;

const LENGTH: &str = "train.seq_len";
const OPTIMIZER: &str = "train.optimizer";

/// Scenario keys that change numbers, and hardly time or memory.
const OF_NUMBERS: [&str; 12] = [
    "train.lr",
    "train.min_lr",
    "train.lr_schedule",
    "train.warmup_steps",
    "train.weight_decay",
    "train.decay_norms_and_biases",
    "train.clip_norm",
    "train.eps",
    "train.betas",
    "lora.lora_alpha",
    "lora.lora_dropout",
    "lora.use_rslora",
];
/// Part of the notes on all optimizers that are predicted as another one.
const AS_ADAMW: &str = "AdamW is predicted";

/// Returns the doubt about a key whose value is a variable that the file does not set, or `None`
/// if the key changes neither time nor memory.
pub(crate) fn unset_variable(shown: &str, value: &Node, to: To) -> Option<Doubt> {
    let key = decided(to)?;
    let set = match key {
        "" => "KEY=VALUE".to_owned(),
        key => format!("{key}=VALUE"),
    };
    let message = format!(
        "{shown} = {value} is a variable that the file does not set, so its default is predicted: write its value in \
         the file, or add --set {set}"
    );
    Some(Doubt { key, message })
}

/// Returns whether a key changes time or memory.
pub(crate) fn decides(to: To) -> bool {
    decided(to).is_some()
}

/// Returns the scenario key that a key decides: an empty text if it depends on the value, `None`
/// if the key changes neither time nor memory.
fn decided(to: To) -> Option<&'static str> {
    match to {
        To::Integer(key) | To::Number(key) => matters(key),
        To::Fact(fact) => of_fact(fact),
        To::With(convert) | To::Choice(convert) => {
            // What a conversion decides shows in what it makes of common values.
            let at = Position { line: 1, column: 1 };
            let texts = ["bf16", "full", "full_shard", "adamw_torch", "sdpa"];
            let texts = texts.iter().map(|text| Value::Text((*text).to_owned()));
            let samples = [Value::Bool(true), Value::Integer(2)]
                .into_iter()
                .chain(texts);
            let mut effects = samples.filter_map(|value| convert(&Node::new(at, value)).ok());
            effects.find_map(|effect| of_effect(&effect))
        }
        To::Decisive(_) => Some(""),
        _ => None,
    }
}

fn matters(key: &'static str) -> Option<&'static str> {
    (!OF_NUMBERS.contains(&key)).then_some(key)
}

fn of_effect(effect: &Effect) -> Option<&'static str> {
    match effect {
        Effect::Set(key, _) | Effect::Assume(key, ..) => matters(key),
        Effect::Fact(fact, _) => of_fact(*fact),
        Effect::Engine(Engine::Fsdp | Engine::DeepSpeed) => Some("fsdp.strategy"),
        Effect::Mixed(_) => Some("precision.param_dtype"),
        Effect::All(all) => all.iter().find_map(of_effect),
        Effect::Engine(_) | Effect::Weights(_) | Effect::Targets(_) | Effect::Decisive(_) => {
            Some("")
        }
        _ => None,
    }
}

fn of_fact(fact: Fact) -> Option<&'static str> {
    Some(match fact {
        // --gpus says it, or there is an error.
        Fact::Processes | Fact::Nodes | Fact::GpusPerNode => return None,
        Fact::ZeroStage | Fact::Strategy => "fsdp.strategy",
        Fact::GlobalBatch | Fact::RankBatch | Fact::StepTokens => "train.grad_accum",
        Fact::RankMicroBatch | Fact::MicroBatchTokens | Fact::MostTokens => "train.micro_batch",
        Fact::PackedLength | Fact::SampleLength => LENGTH,
        Fact::DpShard => "mesh.dp_shard",
        Fact::DpReplicate => "mesh.dp_replicate",
        Fact::Expert => "mesh.ep",
        Fact::Recompute => "train.recompute",
        _ => "",
    })
}

/// Keeps the doubts that nothing else settles, and adds those about the length of sequences and
/// about the optimizer.
pub(crate) fn settle(draft: &mut Draft) {
    let is_set = |rows: &[Row], at: usize, key: &str| {
        let others = rows.iter().enumerate().filter(|(i, _)| *i != at);
        let mut placed = others.filter(|(_, row)| row.place.is_some());
        placed.any(|(_, row)| row.settings.iter().any(|s| s.key == key))
    };
    for at in 0..draft.rows.len() {
        let row = &draft.rows[at];
        let is_unset = row.why.as_deref() == Some(UNSET_VARIABLE);
        let doubt = row.doubt.as_ref().filter(|_| is_unset);
        if doubt.is_some_and(|d| is_set(&draft.rows, at, d.key)) {
            draft.rows[at].doubt = None;
        }
    }
    let no_length = draft.value(LENGTH).is_none();
    for row in &mut draft.rows {
        if no_length && row.doubt.is_none() && may_be_a_length(row) {
            let message = format!(
                "no known key gives the length of sequences, and {} = {} may be it: the model's length, up to 8192, \
                 is predicted unless --set {LENGTH}=N says another",
                row.key, row.value
            );
            row.doubt = Some(Doubt {
                key: LENGTH,
                message,
            });
        }
        if row.doubt.is_none() && may_be_a_teacher(row) {
            let message = format!(
                "{} = {} may be a second model in memory that runs forward (distillation), which is not predicted: \
                 the job needs more memory and time than predicted here",
                row.key, row.value
            );
            row.doubt = Some(Doubt { key: "", message });
        }
        if row.status != Status::NoCounterpart(Lack::Nothing)
            && let Some(why) = row.why.as_deref().filter(|why| why.contains(AS_ADAMW))
        {
            let message = format!("{} = {}: {why}", row.key, row.value);
            row.doubt = Some(Doubt {
                key: OPTIMIZER,
                message,
            });
        }
    }
}

/// Returns whether a key that is not known, or that describes data, has the name and the value of
/// a length of sequences.
fn may_be_a_length(row: &Row) -> bool {
    let why = row.why.as_deref().unwrap_or_default();
    if row.place.is_none() || !(why.starts_with(UNKNOWN) || why == DATA) {
        return false;
    }
    let number = row.value.replace('_', "").parse::<u64>();
    if !row.value.starts_with('$') && !number.is_ok_and(|n| n >= MIN_SEQ_LEN) {
        return false;
    }
    let name = row.key.to_ascii_lowercase().replace(['-', '.'], "_");
    let mut words = name.split('_');
    let other = words.clone().any(|word| NO_LENGTHS.contains(&word));
    !other
        && (name.contains("block_size")
            || words.any(|w| w == "tokens" || w.ends_with("len") || w.starts_with("length")))
}

/// Returns whether a key that is not known has the name of a teacher, and not only of its settings.
fn may_be_a_teacher(row: &Row) -> bool {
    let is_unknown = row.why.as_deref().is_some_and(|w| w.starts_with(UNKNOWN));
    let name = row.key.to_ascii_lowercase().replace(['-', '.'], "_");
    let mut words = name.split('_');
    let off = matches!(
        row.value.to_ascii_lowercase().as_str(),
        "false" | "none" | "0" | "no"
    );
    let forced = name.contains("teacher_forc");
    row.place.is_some() && is_unknown && !off && !forced && words.any(|w| w == "teacher")
}

/// Length below which a number is none of sequences.
const MIN_SEQ_LEN: u64 = 16;
/// Words in names of other lengths: of prompts, and of what a model generates.
const NO_LENGTHS: [&str; 12] = [
    "add",
    "completion",
    "eval",
    "generation",
    "new",
    "num",
    "output",
    "prompt",
    "response",
    "special",
    "val",
    "validation",
];
