//! Derives settings that several keys determine together: mesh, batch, engine, precision, model.

mod architecture;
mod engine;
mod experts;
mod frameworks;
mod graphs;
mod mesh;
mod precision;
mod recompute;
mod wrapped;

pub(crate) use architecture::{Activation, Positions};
pub(crate) use experts::FLEX_BACKENDS;
pub(crate) use graphs::CAPTURED;

use self::frameworks::Rules;
use crate::Options;
use crate::adapters::Targets;
use crate::convert::{FUSED_LOSS, LIGER_KERNELS, REFERENCE};
use crate::doubts;
use crate::draft::{Draft, Given, NamedModel};
use crate::error::ConfigError;
use crate::formats::TRAINER;
use crate::model::{self, Model};
use crate::reader::Reader;
use crate::row::{Lack, Row, Status};
use crate::table::{Engine, Fact, Format, list, quoted};
use std::path::Path;

/// Why options of transformers' own code are not used.
const FUSED: &str = "models with fused kernels are predicted without dropout, with fused attention";

/// Why the end of a schedule is not used.
const SCHEDULE: &str = "the learning rate changes numbers, not time or memory";

/// Why options of adapters are unused if no flag turns adapters on.
const UNSAID: &str = "no argument says that adapters are trained: --set lora.r=N trains them";

/// GPUs per node if nothing says otherwise.
const PER_NODE: u64 = 8;

/// Sets the scenario keys that depend on more than one key.
///
/// # Errors
/// Fails if sizes contradict one another, or if neither the files nor the options give a value that
/// is needed.
pub(crate) fn finish(reader: &mut Reader, options: &Options) -> Result<(), ConfigError> {
    reader.draft.settle_model();
    recognized(reader)?;
    let rules = frameworks::rules(&reader.formats);
    for of in &rules {
        (of.refuse)(&mut reader.draft);
    }
    if let Err(error) = find_model(reader, &rules, options) {
        // A job that cannot be predicted needs no model.
        return Err(reader.draft.refusal().unwrap_or(error));
    }
    let (draft, formats) = (&mut reader.draft, &reader.formats);
    unfused_loss(draft);
    for of in &rules {
        (of.defaults)(draft)?;
    }
    let ranks = sizes(draft, formats, options)?;
    layout(draft, &rules, ranks)?;
    trained(draft, &rules, formats)?;
    let accelerated = formats.iter().any(|f| f.accelerated);
    let engine = engine::decide(draft, formats, accelerated)?;
    if accelerated && engine == engine::Kind::Fsdp {
        wrapped::refuse(draft);
    }
    graphs::decide(draft)?;
    precision::decide(draft, engine, formats)?;
    precision::float8(draft)?;
    for of in &rules {
        (of.last)(draft)?;
    }
    fallbacks(draft, formats, accelerated);
    unused(draft);
    draft.share();
    doubts::settle(draft);
    mark(&mut draft.rows);
    Ok(())
}

/// Leaves the loss as it is where Liger's kernels replace everything else.
fn unfused_loss(draft: &mut Draft) {
    if draft.fact(Fact::UnfusedLoss).is_none() {
        return;
    }
    let fused = |row: &&mut Row| row.why.as_deref() == Some(FUSED_LOSS);
    for row in draft.rows.iter_mut().filter(fused) {
        row.settings.retain(|s| s.key != "train.loss");
        row.why = Some(LIGER_KERNELS.to_owned());
    }
}

/// Scenario keys of which a configuration of the Trainer decides at least one.
const OF_BATCH: [&str; 3] = ["train.micro_batch", "train.grad_accum", LENGTH];

/// Refuses a file that has keys of the Trainer, such as `output_dir`, but neither a model nor a
/// batch nor a length of sequences: it belongs to another program.
///
/// # Errors
/// Fails if the file is one of these.
fn recognized(reader: &Reader) -> Result<(), ConfigError> {
    let draft = &reader.draft;
    let ([format], Some(first)) = (reader.formats.as_slice(), draft.rows.first()) else {
        return Ok(());
    };
    let decides = draft.model.is_some() || OF_BATCH.iter().any(|key| draft.value(key).is_some());
    if format.name != TRAINER.name || decides {
        return Ok(());
    }
    let message = "the format is not known: it has keys of the Hugging Face Trainer, but neither a model \
                   (model_name_or_path) nor a batch (per_device_train_batch_size) nor a length of sequences \
                   (max_length). If these are the Trainer's defaults, say so with per_device_train_batch_size: 8";
    let file = first.place.as_ref().map_or("", |place| &place.file);
    Err(ConfigError::file(Path::new(file), message))
}

/// Decides the sizes of the model and the mesh. Returns the number of data-parallel ranks.
fn sizes(
    draft: &mut Draft,
    formats: &[&'static Format],
    options: &Options,
) -> Result<u64, ConfigError> {
    // The other fallbacks come last: they depend on what is decided until then.
    let fallbacks = formats.iter().flat_map(|f| f.defaults);
    for default in fallbacks.filter(|d| d.key == "train.micro_batch") {
        if draft.fact(Fact::GlobalBatch).is_none() {
            draft.assume(default.key, default.value, default.why);
        }
    }
    packed_length(draft)?;
    let megatron = Some(Engine::MegatronOptimizer);
    if formats.iter().any(|f| f.engine == megatron) {
        architecture::decide(draft)?;
    }
    experts::model(draft)?;
    let ranks = mesh::decide(draft, options)?;
    experts::dispatch(draft, formats)?;
    Ok(ranks)
}

/// Decides the batch, sharding, recompute and compilation.
fn layout(draft: &mut Draft, rules: &[&Rules], ranks: u64) -> Result<(), ConfigError> {
    for of in rules {
        (of.batch)(draft, ranks)?;
    }
    batch(draft, ranks)?;
    pairs(draft)?;
    for of in rules {
        (of.sharding)(draft, ranks)?;
    }
    recompute::whole_blocks(draft)?;
    recompute::modules(draft)?;
    recompute::layers(draft)?;
    recompute::compilation(draft)?;
    let wrappers = rules.iter().any(|of| of.reentrant_wrappers);
    recompute::reentrant(draft, wrappers)
}

/// Decides which parameters are trained, and the dtypes of frozen weights.
fn trained(
    draft: &mut Draft,
    rules: &[&Rules],
    formats: &[&'static Format],
) -> Result<(), ConfigError> {
    adapters(draft, formats.iter().any(|f| f.open))?;
    packed_weights(draft)?;
    for of in rules {
        (of.model)(draft)?;
    }
    Ok(())
}

/// Sets the keys that are still not set to the frameworks' fallbacks.
fn fallbacks(draft: &mut Draft, formats: &[&'static Format], accelerated: bool) {
    let all = formats.iter().flat_map(|f| f.defaults);
    for default in all.filter(|d| d.key != experts::DISPATCHER) {
        draft.assume(default.key, default.value, default.why);
    }
    draft.assume("train.micro_batch", "1", UNSAID_BATCH);
    if draft.value(LENGTH).is_none() {
        unsaid_length(draft);
    }
    if accelerated {
        let why = "such jobs train models of transformers";
        draft.assume("model.implementation", quoted("transformers"), why);
    }
}

/// Drops keys that have no effect with the other ones.
fn unused(draft: &mut Draft) {
    if !draft.is("model.implementation", "transformers") {
        for key in ["lora.lora_dropout", "model.attn_implementation"] {
            draft.unset(key, Lack::Accuracy, FUSED);
        }
    }
    if !draft.is("train.lr_schedule", "cosine") {
        draft.unset("train.min_lr", Lack::Nothing, SCHEDULE);
    }
}

/// Notes of rows without settings that they have no effect.
fn mark(rows: &mut [Row]) {
    let unset =
        |row: &&mut Row| row.status == Status::Used && row.settings.is_empty() && row.why.is_none();
    for row in rows.iter_mut().filter(unset) {
        let off = matches!(row.value.as_str(), "false" | "False" | "0");
        let why = if off {
            "off"
        } else {
            "has no effect in this job"
        };
        row.status = Status::NoCounterpart(Lack::Nothing);
        row.why = Some(why.to_owned());
    }
}

/// Why one sequence per micro-batch is predicted.
const UNSAID_BATCH: &str =
    "no key gives a micro-batch: one sequence, unless --set train.micro_batch=N says it";
const LENGTH: &str = "train.seq_len";

/// Notes which sequence length is predicted if no key gives one.
fn unsaid_length(draft: &mut Draft) {
    draft.rows.push(Row {
        place: None,
        key: LENGTH.to_owned(),
        value: "the model's".to_owned(),
        status: Status::Assumed,
        settings: Vec::new(),
        why: Some(
            "no key gives a length of sequences: the model's, up to 8192, unless --set train.seq_len=N says it"
                .to_owned(),
        ),
        doubt: None,
    });
}

/// Replaces the length of the data's sequences with the length of packed sequences.
///
/// # Errors
/// Fails if another key gives a different value.
fn packed_length(draft: &mut Draft) -> Result<(), ConfigError> {
    let Some(given) = draft.fact(Fact::PackedLength) else {
        return match draft.fact(Fact::SampleLength) {
            Some(longest) if draft.value(LENGTH).is_none() => {
                draft.set(longest.row, LENGTH, longest.value.to_string())
            }
            _ => Ok(()),
        };
    };
    let why = "packed sequences are longer";
    draft.unset(LENGTH, Lack::Nothing, why);
    draft.set(given.row, LENGTH, given.value.to_string())
}

/// Drops the options of adapters if none are trained, and gives them a rank if they are.
///
/// # Errors
/// Fails if another key names other layers.
fn adapters(draft: &mut Draft, is_open: bool) -> Result<(), ConfigError> {
    let (rows, targets) = draft.take_targets();
    if let Some(given) = draft.fact(Fact::Adapter).filter(|a| a.value == 1) {
        let why = &mut draft.rows[given.row].why;
        why.get_or_insert_with(|| "adapters are trained".to_owned());
        draft.assume("lora.r", "8", "the default of PEFT");
        let value = targets.map(|targets| match targets {
            Targets::AllLinear => quoted("all-linear"),
            Targets::Named(names) => list(&names),
        });
        for (row, value) in rows.into_iter().zip(value.iter().cycle()) {
            draft.set(row, "lora.target_modules", value.clone())?;
        }
        return Ok(());
    }
    // Scripts may have their own flag for adapters, or none.
    let (lack, why) = match draft.fact(Fact::Adapter) {
        None if is_open => (Lack::Accuracy, UNSAID),
        _ => (Lack::Nothing, "no adapters are trained"),
    };
    for row in rows {
        draft.none(row, lack, why);
    }
    for key in [
        "r",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "use_dora",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
    ] {
        draft.unset(&format!("lora.{key}"), lack, why);
    }
    Ok(())
}

/// Keeps the frozen model in 4 bits (QLoRA) or in int8.
///
/// # Errors
/// Fails if another key gives a different value.
fn packed_weights(draft: &mut Draft) -> Result<(), ConfigError> {
    const KEY: &str = "precision.frozen_params";
    let why = "4-bit weights are modeled only under adapters (QLoRA)";
    let too = under_adapters(draft, Fact::FourBitsToo, why);
    if let Some(given) = under_adapters(draft, Fact::FourBits, why).or(too) {
        let said = draft.fact(Fact::DoubleQuantization);
        let double = said.map_or(given.value == 2, |s| s.value == 1);
        let name = quoted(if double { "nf4" } else { "nf4_f32" });
        let too = too.filter(|too| too.row != given.row);
        let rows = [Some(given), too, said].map(|g| g.map(|g| g.row));
        for row in rows.into_iter().flatten() {
            draft.set(row, KEY, name.clone())?;
        }
    }
    let why = "8-bit weights are modeled only under adapters";
    match under_adapters(draft, Fact::EightBits, why) {
        Some(given) => draft.set(given.row, KEY, quoted("int8")),
        None => Ok(()),
    }
}

/// Returns a fact about the frozen model if adapters are trained. Otherwise marks the fact as
/// having no counterpart, for the reason `why`.
fn under_adapters(draft: &mut Draft, fact: Fact, why: &str) -> Option<Given<u64>> {
    let given = draft.fact(fact)?;
    if draft.value("lora.r").is_none() {
        draft.none(given.row, Lack::Everything, why);
        return None;
    }
    Some(given)
}

/// Doubles the number of sequences for samples that are pairs, and adds the forward of their
/// reference model. The reference is the model without its adapters; its forward takes only
/// slightly less time than one with adapters.
///
/// # Errors
/// Fails if another key gives a different value.
fn pairs(draft: &mut Draft) -> Result<(), ConfigError> {
    let reference = draft.fact(Fact::Reference);
    let Some(given) = draft.fact(Fact::Pairs) else {
        return match reference {
            Some(reference) => without_pairs(draft, reference),
            None => Ok(()),
        };
    };
    let without = draft.fact(Fact::WithoutReference).is_some();
    if let Some(reference) = reference.filter(|_| !without) {
        if draft.fact(Fact::Adapter).is_none_or(|a| a.value == 0) {
            draft.none(reference.row, Lack::Everything, REFERENCE);
            return Ok(());
        }
        let in_advance = draft.fact(Fact::ReferenceInAdvance);
        if reference.value == 1 && in_advance.is_none_or(|a| a.value == 0) {
            draft.set(given.row, "train.no_grad_forwards", "1".to_owned())?;
        }
    }
    draft.double("train.micro_batch", given.row);
    let why =
        "both answers of a sample run in one forward: twice as many sequences per micro-batch";
    draft.approximates(given.row, why);
    Ok(())
}

/// Adds the forward of the reference model of a loss over single sequences, such as ASFT's.
///
/// # Errors
/// Fails if another key gives a different value.
fn without_pairs(draft: &mut Draft, reference: Given<u64>) -> Result<(), ConfigError> {
    if draft.fact(Fact::Adapter).is_none_or(|a| a.value == 0) {
        draft.none(reference.row, Lack::Everything, REFERENCE);
        return Ok(());
    }
    draft.set(reference.row, "train.no_grad_forwards", "1".to_owned())
}

/// Decides the micro-batch and the gradient accumulation.
fn batch(draft: &mut Draft, ranks: u64) -> Result<(), ConfigError> {
    let number = |draft: &Draft, key: &str| draft.value(key).and_then(|v| v.parse::<u64>().ok());
    if let Some(tokens) = draft.fact(Fact::MicroBatchTokens) {
        let length = number(draft, "train.seq_len").unwrap_or(2048).max(1);
        let sequences = (tokens.value / length).max(1);
        draft.set(tokens.row, "train.micro_batch", sequences.to_string())?;
    }
    if let Some(each) = draft.fact(Fact::RankBatch) {
        let micro = number(draft, "train.micro_batch").unwrap_or(1).max(1);
        if draft.value("train.grad_accum").is_some() {
            draft.none(each.row, Lack::Nothing, "the accumulation steps decide");
        } else if each.value < micro {
            let message = format!(
                "a batch of {} is smaller than a micro-batch of {micro}",
                each.value
            );
            return Err(draft.error(each.row, message));
        } else {
            draft.set(
                each.row,
                "train.grad_accum",
                (each.value / micro).to_string(),
            )?;
        }
    }
    let sequences = draft.fact(Fact::GlobalBatch);
    let tokens = draft.fact(Fact::StepTokens);
    let length = number(draft, "train.seq_len");
    let (row, all) = match (sequences, tokens, length) {
        (Some(given), ..) => (given.row, given.value),
        (None, Some(given), Some(length)) if length > 0 => (given.row, given.value / length),
        _ => return Ok(()),
    };
    let micro = number(draft, "train.micro_batch");
    let steps = number(draft, "train.grad_accum");
    let refuse = |parts: String| {
        let message = format!("a batch of {all} sequences is not {parts} on {ranks} ranks");
        Err(draft.error(row, message))
    };
    match (micro, steps) {
        (Some(micro), Some(steps)) => {
            if micro.saturating_mul(steps).saturating_mul(ranks) != all {
                return refuse(format!("{steps} micro-batches of {micro}"));
            }
        }
        (micro, None) => {
            let each = micro.unwrap_or(1).saturating_mul(ranks).max(1);
            if all == 0 || !all.is_multiple_of(each) {
                return refuse(format!(
                    "a multiple of micro-batches of {}",
                    micro.unwrap_or(1)
                ));
            }
            draft.set(row, "train.grad_accum", (all / each).to_string())?;
        }
        (None, Some(steps)) => {
            let each = steps.saturating_mul(ranks).max(1);
            if all == 0 || !all.is_multiple_of(each) {
                return refuse(format!("a multiple of {steps} micro-batches"));
            }
            draft.set(row, "train.micro_batch", (all / each).to_string())?;
        }
    }
    Ok(())
}

/// Sets the family of a torchtune model whose builder takes the sizes as arguments.
///
/// # Errors
/// Fails if the builder is for another model.
fn sized(draft: &mut Draft, named: &NamedModel) -> Result<(), ConfigError> {
    let is = |family: &str| named.name.starts_with(family);
    if !(is("llama") || is("mistral") || is("qwen2")) {
        return Err(draft.error(named.row, model::absent(&named.name)));
    }
    draft.set(named.row, "model.family", quoted("llama"))?;
    if is("qwen2") {
        draft.set(named.row, "model.bias", quoted("qkv"))?;
    }
    Ok(())
}

/// Finds the model on this machine, or a shipped preset with its shapes.
fn find_model(reader: &mut Reader, rules: &[&Rules], options: &Options) -> Result<(), ConfigError> {
    let draft = &mut reader.draft;
    if let Some(path) = &options.model {
        let Some(file) = model::config_in(path) else {
            let name = path.display();
            return Err(ConfigError::Missing(format!(
                "--model {name}: expected a folder with config.json, or such a file"
            )));
        };
        let named = [&draft.config, &draft.model, &draft.family, &draft.flavor].map(Option::as_ref);
        for row in named
            .into_iter()
            .flatten()
            .map(|m| m.row)
            .collect::<Vec<_>>()
        {
            draft.none(row, Lack::Nothing, "replaced by --model");
        }
        draft.option(
            "model.preset",
            quoted(&file.display().to_string()),
            "--model",
        );
        return Ok(());
    }
    if let Some(named) = draft.config.clone().or(draft.model.clone()) {
        let resizes = rules.iter().any(|of| of.resizes_models);
        if draft.value("model.layers").is_some() && !resizes {
            return sized(draft, &named);
        }
        let cache = options.cache.as_deref();
        let row = named.row;
        return match model::find(&named.name, &reader.model_folder, cache) {
            Some(Model::File(file)) => {
                draft.set(row, "model.preset", quoted(&file.display().to_string()))
            }
            Some(Model::Preset(preset)) => {
                draft.set(row, "model.preset", quoted(preset))?;
                draft.approximates(
                    row,
                    "by its name: the shipped shapes of the published model",
                );
                Ok(())
            }
            None => Err(draft.error(row, model::absent(&named.name))),
        };
    }
    if let Some(flavor) = draft.flavor.clone() {
        let family = draft.family.as_ref().map_or("llama3", |f| &f.name);
        let Some(preset) = model::flavored(family, &flavor.name) else {
            let message = format!(
                "no shapes of {family} {} are shipped: name a folder with its config.json with --model",
                flavor.name
            );
            return Err(draft.error(flavor.row, message));
        };
        if let Some(family) = draft.family.clone() {
            draft.set(family.row, "model.preset", quoted(preset))?;
        }
        draft.set(flavor.row, "model.preset", quoted(preset))?;
        return Ok(());
    }
    if draft.value("model.layers").is_some() || draft.fact(Fact::Mpt).is_some() {
        return Ok(());
    }
    Err(ConfigError::Missing(
        "the configuration names no model: add --model FOLDER, with its config.json".to_owned(),
    ))
}
