//! Determines the optimizer, its hyperparameters, and gradient clipping.

use super::{Facts, Found};
use crate::attribute::{Attributed, in_graphs};
use crate::kineto::Trace;
use shardlab_plan::program::Phase;

/// An optimizer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Optimizer {
    /// Name in lower case, such as `adamw`.
    pub name: String,
    /// Implementation: `fused`, `foreach` or `for-loop`.
    pub form: &'static str,
    /// Learning rate, betas, weight decay and epsilon as text, if they were recorded.
    pub numbers: Option<Numbers>,
}

/// Hyperparameters of Adam and AdamW.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// Learning rate.
    pub lr: String,
    /// Decay rates of the moments.
    pub betas: [String; 2],
    /// Weight decay.
    pub weight_decay: String,
    /// Epsilon.
    pub eps: String,
}

pub(super) fn find(trace: &Trace, a: &Attributed, step: Option<u32>, facts: &mut Facts) {
    let within = |i: usize| a.host[i].filter(|p| step.is_none_or(|s| p.step == s));
    let (mut form, mut numbers, mut op) = ("for-loop", None, None);
    let mut scales = false;
    for (i, event) in trace.host.iter().enumerate() {
        let Some(place) = within(i) else { continue };
        let name = trace.name(event.name);
        match place.phase {
            Phase::Optimizer => {
                let plain = name.rsplit("::").next().unwrap_or(name);
                if plain.starts_with("_fused_") {
                    form = "fused";
                    op = Some(
                        plain
                            .trim_start_matches("_fused_")
                            .trim_matches('_')
                            .to_owned(),
                    );
                    let inputs = event.inputs.map(|i| &trace.inputs[i as usize]);
                    numbers = numbers.or_else(|| adam(plain, trace.name(inputs?.concrete)));
                } else if plain.starts_with("_foreach_") && form != "fused" {
                    form = "foreach";
                }
            }
            Phase::Clip => {
                let plain = name.rsplit("::").next().unwrap_or(name);
                scales |= matches!(plain, "_foreach_mul_" | "mul_" | "clamp" | "clamp_");
            }
            _ => {}
        }
    }
    let named = a.optimizers.first().map(|n| n.to_ascii_lowercase());
    let because = if named.is_some() {
        "name of the Optimizer.step range"
    } else {
        "name of the optimizer's operator"
    };
    facts.optimizer = named.or(op).map(|name| {
        Found::new(
            Optimizer {
                name,
                form,
                numbers,
            },
            because,
        )
    });
    // Without host operators, or with only those that launch a graph, it is unknown whether there
    // is a norm.
    if trace.host.iter().all(|e| e.is_annotation) || in_graphs(trace, a) * 2 > a.work.len() {
        return;
    }
    let Some(step) = step
        .map(|s| &a.steps.all[s as usize])
        .filter(|s| s.optimizer.is_some())
    else {
        return;
    };
    facts.clip = Some(match (step.norm, scales) {
        (true, true) => Found::new(
            true,
            "gradients' norm is computed and gradients are scaled before the optimizer",
        ),
        (true, false) => Found::new(
            false,
            "gradients' norm is computed, but nothing is scaled by it",
        ),
        (false, _) => Found::new(false, "no norm is computed between backward and optimizer"),
    });
}

/// Returns the hyperparameters among the arguments of a fused Adam.
fn adam(name: &str, concrete: &str) -> Option<Numbers> {
    if !name.contains("adam") {
        return None;
    }
    let all: Vec<String> = serde_json::from_str(concrete).ok()?;
    let number = |i: usize| {
        let x: f64 = all.get(i)?.parse().ok()?;
        Some(shortest(x))
    };
    // Execution traces write small numbers as 0.
    let eps = number(10)?;
    if eps == "0.0" {
        return None;
    }
    Some(Numbers {
        lr: number(6)?,
        betas: [number(7)?, number(8)?],
        weight_decay: number(9)?,
        eps,
    })
}

/// Formats a number as a person would write it: PyTorch prints 17 digits.
fn shortest(x: f64) -> String {
    // Rounding to 15 digits removes the noise of printing 17 digits and of intermediate
    // computations.
    let rounded: f64 = format!("{x:.14e}").parse().unwrap_or(x);
    if rounded != 0.0 && rounded.abs() < 1e-3 {
        format!("{rounded:e}")
    } else {
        format!("{rounded:?}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_someone_would_write_them() {
        let text = r#"["", "", "", "", "", "", "0.00029999999999999997", "0.90000000000000002", "0.999", "0.01", "1e-08", "False", "False", "", ""]"#;
        let numbers = adam("_fused_adamw_", text).unwrap();
        assert_eq!(numbers.lr, "3e-4");
        assert_eq!(numbers.betas, ["0.9", "0.999"]);
        assert_eq!((&*numbers.weight_decay, &*numbers.eps), ("0.01", "1e-8"));
        assert_eq!(adam("_fused_adamw_", "[]"), None);
        assert_eq!(shortest(0.0), "0.0");
    }
}
