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
    /// Hyperparameters, as far as arguments of operators show them.
    pub numbers: Numbers,
}

/// Hyperparameters as text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// Learning rate.
    pub lr: Option<String>,
    /// Decay rates of Adam's moments.
    pub betas: Option<[String; 2]>,
    /// Weight decay.
    pub weight_decay: Option<String>,
    /// Epsilon.
    pub eps: Option<String>,
    /// Momentum of SGD, if it is not 0.
    pub momentum: Option<String>,
    /// Product of learning rate and weight decay, if the trace only shows this.
    pub decay_per_step: Option<String>,
}

pub(super) fn find(trace: &Trace, a: &Attributed, step: Option<u32>, facts: &mut Facts) {
    let within = |i: usize| a.host[i].filter(|p| step.is_none_or(|s| p.step == s));
    let (mut form, mut numbers, mut op) = ("for-loop", None, None);
    let mut foreach: Vec<(&str, &str)> = Vec::new();
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
                    numbers = numbers.or_else(|| fused(plain, trace.name(inputs?.concrete)));
                } else if plain.starts_with("_foreach_") {
                    if form != "fused" {
                        form = "foreach";
                    }
                    if let Some(inputs) = event.inputs {
                        let inputs = &trace.inputs[inputs as usize];
                        foreach.push((plain, trace.name(inputs.concrete)));
                    }
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
        let numbers = numbers.unwrap_or_else(|| from_foreach(&name, &foreach));
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

/// Returns the arguments of an operator.
fn arguments(concrete: &str) -> Vec<String> {
    serde_json::from_str(concrete).unwrap_or_default()
}

/// Returns the argument at an index as a number.
fn number(all: &[String], i: usize) -> Option<f64> {
    all.get(i)?.parse().ok()
}

/// Returns the hyperparameters among the arguments of a fused optimizer.
fn fused(name: &str, concrete: &str) -> Option<Numbers> {
    let all = arguments(concrete);
    let text = |i: usize| number(&all, i).map(shortest);
    if name.contains("sgd") {
        return Some(Numbers {
            weight_decay: text(3),
            momentum: text(4).filter(|m| m != "0.0"),
            lr: text(5),
            ..Numbers::default()
        });
    }
    // Execution traces write small numbers as 0.
    let eps = text(10).filter(|e| e != "0.0")?;
    if !name.contains("adam") {
        return None;
    }
    Some(Numbers {
        lr: Some(text(6)?),
        betas: Some([text(7)?, text(8)?]),
        weight_decay: Some(text(9)?),
        eps: Some(eps),
        ..Numbers::default()
    })
}

/// Returns the hyperparameters that the operators of a `foreach` implementation have as arguments,
/// in order: name and arguments of each.
///
/// Adam multiplies weights by `1 - lr * weight_decay`, moves the first moment by `1 - beta1`,
/// multiplies the second by `beta2`, and adds `eps`. Its learning rate is in a list. SGD multiplies
/// its state by the momentum, and adds gradients times `-lr`.
fn from_foreach(optimizer: &str, all: &[(&str, &str)]) -> Numbers {
    let of = |name: &str, i: usize| {
        let found = all.iter().filter(|(op, _)| *op == name);
        let numbers = found.filter_map(|(_, a)| number(&arguments(a), i));
        numbers.collect::<Vec<f64>>()
    };
    let first = |list: Vec<f64>| list.into_iter().next();
    if optimizer == "sgd" {
        let lr = of("_foreach_add_", 2).into_iter().find(|x| *x < 0.0);
        return Numbers {
            momentum: first(of("_foreach_mul_", 1)).map(shortest),
            lr: lr.map(|x| shortest(-x)),
            ..Numbers::default()
        };
    }
    let Some(moved) = first(of("_foreach_lerp_", 2)) else {
        return Numbers::default();
    };
    let lerp = all.iter().position(|(op, _)| *op == "_foreach_lerp_");
    let (before, after) = all.split_at(lerp.unwrap_or(0));
    let factor = |list: &[(&str, &str)]| {
        let found = list.iter().find(|(op, _)| *op == "_foreach_mul_");
        found.and_then(|(_, a)| number(&arguments(a), 1))
    };
    let eps = after.iter().filter(|(op, _)| *op == "_foreach_add_");
    let eps = eps.filter_map(|(_, a)| number(&arguments(a), 1)).next();
    Numbers {
        betas: factor(after).map(|b| [shortest(1.0 - moved), shortest(b)]),
        eps: eps.map(shortest),
        // The difference to 1 has fewer correct digits.
        decay_per_step: factor(before)
            .and_then(|f| format!("{:.5e}", 1.0 - f).parse().ok())
            .map(shortest),
        ..Numbers::default()
    }
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
        let numbers = fused("_fused_adamw_", text).unwrap();
        assert_eq!(numbers.lr.unwrap(), "3e-4");
        assert_eq!(numbers.betas.unwrap(), ["0.9", "0.999"]);
        assert_eq!(numbers.weight_decay.unwrap(), "0.01");
        assert_eq!(numbers.eps.unwrap(), "1e-8");
        assert_eq!(fused("_fused_adamw_", "[]"), None);
        assert_eq!(shortest(0.0), "0.0");
    }

    /// Operators of AdamW(lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True), and of
    /// SGD(lr=1e-2, momentum=0.9), as recorded with PyTorch 2.11.
    #[test]
    fn operators_on_lists_show_their_numbers() {
        let adamw = [
            ("_foreach_add_", r#"["", "", "1."]"#),
            ("_foreach_mul_", r#"["", "0.99997000000000003"]"#),
            ("_foreach_lerp_", r#"["", "", "0.099999999999999978"]"#),
            ("_foreach_mul_", r#"["", "0.94999999999999996"]"#),
            (
                "_foreach_addcmul_",
                r#"["", "", "", "0.050000000000000044"]"#,
            ),
            ("_foreach_sqrt", r#"[""]"#),
            ("_foreach_div_", r#"["", ""]"#),
            ("_foreach_add_", r#"["", "1e-08"]"#),
            ("_foreach_addcdiv_", r#"["", "", "", ""]"#),
        ];
        let found = from_foreach("adamw", &adamw);
        assert_eq!(found.betas.unwrap(), ["0.9", "0.95"]);
        assert_eq!(found.eps.unwrap(), "1e-8");
        assert_eq!(found.decay_per_step.unwrap(), "3e-5");
        assert_eq!((found.lr, found.weight_decay), (None, None));
        let sgd = [
            ("_foreach_mul_", r#"["", "0.90000000000000002"]"#),
            ("_foreach_add_", r#"["", "", "1"]"#),
            ("_foreach_add_", r#"["", "", "-0.01"]"#),
        ];
        let found = from_foreach("sgd", &sgd);
        assert_eq!(found.momentum.unwrap(), "0.9");
        assert_eq!(found.lr.unwrap(), "0.01");
        let fused = fused("_fused_sgd_", r#"["", "", "", "0.", "0.9", "0.1", "0."]"#).unwrap();
        assert_eq!(fused.momentum.unwrap(), "0.9");
        // Without shapes, operators have no arguments.
        assert_eq!(from_foreach("adamw", &[]), Numbers::default());
    }
}
