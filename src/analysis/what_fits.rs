//! What fits on some GPUs: models of several sizes, trained in full or with LoRA.

use super::gpu_counts;
use super::verdict::HEADROOM;
use super::whatif::Effect;
use crate::predict::{PredictError, Prediction, Profiles, predict_light};
use rayon::prelude::*;
use shardlab_plan::record::Basis;
use shardlab_plan::scenario;
use shardlab_plan::units::Bytes;

/// Models to try, smallest first.
const MODELS: [&str; 4] = ["llama3.2-1b", "llama3.2-3b", "llama3-8b", "llama3-70b"];

/// Largest multiple of the number of GPUs that is tried.
pub const MORE: u64 = 64;

/// Settings with decreasing memory requirements, fastest first, and their descriptions.
const LADDER: [(&str, &[&str]); 4] = [
    ("no recompute", &["train.recompute=none"]),
    ("selective recompute", &["train.recompute=selective"]),
    ("full recompute", &["train.recompute=full"]),
    (
        "full recompute, chunked loss",
        &["train.recompute=full", "train.loss=chunked"],
    ),
];

/// Number of tokens per sequence. Every GPU trains one sequence at a time.
pub const TOKENS: u64 = 4096;

/// One way to train a model.
#[derive(Clone, Debug)]
pub struct Training {
    /// Name of the model's shipped preset.
    pub model: &'static str,
    /// Number of parameters, including those of adapters.
    pub parameters: u64,
    /// Whether adapters (LoRA) are trained instead of the model.
    pub lora: bool,
    /// Whether it fits.
    pub answer: Answer,
}

/// Whether some training fits.
#[derive(Clone, Debug)]
pub enum Answer {
    /// The training fits and leaves the usual headroom.
    Fits {
        /// The settings in words.
        with: &'static str,
        /// The settings, in the syntax of `--set`.
        set: Vec<String>,
        /// Step time and memory.
        effect: Box<Effect>,
        /// The basis of the prediction.
        basis: Option<Basis>,
    },
    /// It does not fit.
    No {
        /// Memory that each GPU needs with the most economical settings.
        needed: Bytes,
        /// Smallest number of GPUs on which it fits, a part of a node or whole nodes, if up to 64
        /// times as many are enough.
        gpus: Option<u64>,
    },
}

/// Returns which models fit on the GPUs that `mesh` describes. `mesh` are overrides for
/// `mesh.hardware` and the sizes of the mesh, of which `mesh.dp_shard` is `gpus`.
///
/// # Errors
/// Fails if the hardware profile is not valid.
pub(crate) fn what_fits(
    gpus: u64,
    mesh: &[String],
    profiles: &Profiles,
) -> Result<Vec<Training>, PredictError> {
    let kinds = MODELS.iter().flat_map(|m| [(*m, false), (*m, true)]);
    let kinds: Vec<(&str, bool)> = kinds.collect();
    let try_one = |(model, lora): (&'static str, bool)| training(model, lora, gpus, mesh, profiles);
    kinds.into_par_iter().map(try_one).collect()
}

fn training(
    model: &'static str,
    lora: bool,
    gpus: u64,
    mesh: &[String],
    profiles: &Profiles,
) -> Result<Training, PredictError> {
    let scenario = |rung: &[&str], more: &[String]| {
        let rung = rung.iter().map(|s| (*s).to_owned());
        let set: Vec<String> = mesh.iter().chain(more).cloned().chain(rung).collect();
        scenario::parse(model, &text(model, lora), &set)
    };
    let is_enough = |p: &Prediction| p.leaves(HEADROOM);
    let mut last = None;
    for (with, rung) in LADDER {
        let p = predict_light(&scenario(rung, &[])?, profiles)?;
        if is_enough(&p) {
            return Ok(Training {
                model,
                parameters: p.program.meta.parameters.total,
                lora,
                answer: Answer::Fits {
                    with,
                    set: rung.iter().map(|s| (*s).to_owned()).collect(),
                    effect: Box::new(Effect::of(&p)),
                    basis: p.run.basis.clone(),
                },
            });
        }
        last = Some((p, rung));
    }
    let (p, rung) = last.expect("the ladder has rungs");
    let load = |n: u64| scenario(rung, &[format!("mesh.dp_shard={n}")]);
    let node = u64::from(p.scenario.mesh.gpus_per_node);
    let counts = gpu_counts::shards(1, node, gpus, gpus * MORE, |n| load(n).is_ok());
    let fits = |n: u64| {
        let p = predict_light(&load(n).ok()?, profiles).ok()?;
        is_enough(&p).then_some(n)
    };
    Ok(Training {
        model,
        parameters: p.program.meta.parameters.total,
        lora,
        answer: Answer::No {
            needed: p.needs().device,
            gpus: gpu_counts::smallest(&counts, fits),
        },
    })
}

/// Returns a scenario for PyTorch's `fully_shard` with the usual precisions.
fn text(model: &str, lora: bool) -> String {
    let lora = if lora {
        "[lora]\nr = 16\nlora_alpha = 32\n"
    } else {
        ""
    };
    format!(
        "[model]\npreset = \"{model}\"\n{lora}\
         [train]\nseq_len = {TOKENS}\nmicro_batch = 1\n\
         [mesh]\nhardware = \"h100-80\"\ndp_shard = 1\n\
         [fsdp]\npolicy = \"fsdp2\"\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(gpus: u64, hardware: &str) -> Vec<Training> {
        let mesh = [
            format!("mesh.hardware={hardware}"),
            format!("mesh.dp_shard={gpus}"),
        ];
        what_fits(gpus, &mesh, &Profiles::default()).unwrap()
    }

    fn of<'a>(all: &'a [Training], model: &str, lora: bool) -> &'a Answer {
        let found = all.iter().find(|t| t.model == model && t.lora == lora);
        &found.unwrap().answer
    }

    #[test]
    fn more_memory_never_takes_leaner_settings() {
        let (small, large) = (ask(1, "a100-40"), ask(1, "h200-nvlink"));
        let rung = |answer: &Answer| match answer {
            Answer::Fits { with, .. } => LADDER.iter().position(|(w, _)| w == with).unwrap(),
            Answer::No { .. } => LADDER.len(),
        };
        for (a, b) in small.iter().zip(&large) {
            assert!(rung(&a.answer) >= rung(&b.answer), "{a:?} {b:?}");
            let lora = of(&small, a.model, true);
            assert!(rung(lora) <= rung(of(&small, a.model, false)), "{a:?}");
        }
        // 16 bytes of state per parameter: 8.03 billion parameters take 119.7 GiB.
        let Answer::No { needed, gpus } = of(&small, "llama3-8b", false) else {
            panic!("8B cannot fit in 40 GB");
        };
        assert!(needed.gib() > 119.7, "{needed}");
        assert!(gpus.is_some_and(|n| n >= 4), "{gpus:?}");
        // 16-bit weights alone take 131 of the 140 GiB of one GPU.
        assert!(matches!(of(&large, "llama3-70b", false), Answer::No { .. }));
    }

    /// 70B needs neither a doubled number of GPUs nor more than on a part of a node.
    #[test]
    fn the_smallest_number_of_gpus_does_not_depend_on_the_given_one() {
        let of_70b = |gpus: u64| match of(&ask(gpus, "h100-80"), "llama3-70b", false) {
            Answer::No { gpus, .. } => *gpus,
            Answer::Fits { .. } => panic!("16 bytes per parameter are more than {gpus} GPUs have"),
        };
        let fewest = of_70b(8).unwrap();
        assert!(
            fewest.is_multiple_of(8) && !fewest.is_power_of_two(),
            "{fewest}"
        );
        assert_eq!((of_70b(1), of_70b(3)), (Some(fewest), Some(fewest)));
    }

    #[test]
    fn what_fits_leaves_headroom() {
        for training in ask(8, "h100-80") {
            match training.answer {
                Answer::Fits { effect, .. } => assert!(effect.has_headroom, "{}", training.model),
                Answer::No { needed, .. } => assert!(needed.gib() > 70.0, "{}", training.model),
            }
        }
    }
}
