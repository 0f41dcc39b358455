//! Policies: which rank gathers, reduces and frees which buffers, and when.
//!
//! Each policy is one folder. `spec.rs` holds its defaults, the values that it rejects, the keys
//! that have no effect under it, and its parameter layout. The other files implement its lifecycle
//! with [`lower`]. `full/` is the schedule of compile mode full, which replaces the policy's own.
//! [`plan`] turns a scenario into a program.

pub(crate) mod fsdp2;
pub(crate) mod full;
pub(crate) mod megatron;
pub(crate) mod megatron_v2;
pub(crate) mod native;
pub(crate) mod pr4435;
pub(crate) mod spec;

use crate::compile::tape::Tape;
use crate::config::{Fsdp, GradientSync, PolicyKind, Scenario, Variant};
use crate::lower::{self, Lowering, PlanError};
use crate::program::Program;
use spec::{PolicySpec, Refusal, Rules, fully_compiled, skips_blocks};

/// Specs of all policies and their variants. The first spec of a policy is its released engine.
const SPECS: [&PolicySpec; 5] = [
    &native::SPEC,
    &fsdp2::SPEC,
    &megatron::SPEC,
    &megatron_v2::SPEC,
    &pr4435::SPEC,
];

impl PolicySpec {
    /// Returns the spec of a policy in a variant, or in its released variant if it has no such
    /// variant.
    ///
    /// # Panics
    /// Never panics: a test checks that every policy has a spec.
    pub(crate) fn of(policy: PolicyKind, variant: Variant) -> &'static Self {
        let mut specs = SPECS.iter().filter(|spec| spec.kind == policy);
        let found = specs.clone().find(|spec| spec.variant == variant);
        found.or(specs.next()).expect("every policy has a spec")
    }

    /// Returns the name that messages use: that of the policy, or that of the variant.
    fn name(&self) -> String {
        match self.variant {
            Variant::Released => format!("policy {}", self.kind.name()),
            variant => format!("variant {}", variant.name()),
        }
    }
}

impl Fsdp {
    /// Returns the spec of the policy.
    pub(crate) fn spec(&self) -> &'static PolicySpec {
        PolicySpec::of(self.policy, self.variant)
    }

    /// Returns whether users of the policy's engine can give a key (a path such as `fsdp.units`)
    /// this value. Engines other than the native one fix some options in their code.
    #[must_use]
    pub fn can_set(&self, key: &str, value: &str) -> bool {
        !(self.spec().fixes)(key, value)
    }
}

/// Returns the rules that apply to a scenario: those of its policy and, in compile mode full, those
/// of that mode.
pub(crate) fn rules(s: &Scenario) -> impl DoubleEndedIterator<Item = &'static Rules> {
    let full = fully_compiled(s).then_some(&full::RULES);
    std::iter::once(&s.fsdp.spec().rules).chain(full)
}

/// Returns whether a key of `[fsdp]` is an option that not every schedule has.
pub(crate) fn is_option(key: &str) -> bool {
    SPECS.iter().any(|spec| spec.rules.has(key)) || full::RULES.has(key)
}

/// Returns the names of the policies under which no value of a key has an effect, including compile
/// mode full.
pub(crate) fn ignoring(path: &str) -> Vec<String> {
    let ignores = |rules: &Rules| {
        let mut rows = rules.without_effect.iter();
        rows.any(|row| row.key == path && row.only.is_none())
    };
    // A variant is named only if it differs from its policy's released engine.
    let alike = |spec: &PolicySpec| ignores(&PolicySpec::of(spec.kind, Variant::Released).rules);
    let named = |spec: &&&PolicySpec| spec.variant.is_released() || !alike(spec);
    let specs = SPECS
        .iter()
        .filter(|spec| ignores(&spec.rules))
        .filter(named);
    let policies = specs.map(|spec| spec.name());
    let full = ignores(&full::RULES).then(|| "compile mode full".to_owned());
    policies.chain(full).collect()
}

/// Returns the names of the policies that support an option of `[fsdp]`, for example
/// `policy native outside compile mode full`.
pub(crate) fn with_option(option: &str) -> String {
    // Variants support all options of their policy, or a subset.
    let has = |spec: &&&PolicySpec| spec.rules.has(option) && spec.variant == Variant::Released;
    let names: Vec<&str> = SPECS.iter().filter(has).map(|s| s.kind.name()).collect();
    let noun = if names.len() == 1 {
        "policy"
    } else {
        "policies"
    };
    let outside = if full::RULES.has(option) {
        ""
    } else {
        " outside compile mode full"
    };
    format!("{noun} {}{outside}", names.join(" and "))
}

/// Rejects engines that reduce over `dp_replicate` only in the last micro-batch of a step.
const GRADIENTS_ADDED_UP: Refusal = Refusal {
    keys: &["fsdp.gradient_sync", "fsdp.policy"],
    when: |s| {
        let every = s.fsdp.gradient_sync == GradientSync::Every;
        every && s.mesh.dp_outer > 1 && !fully_compiled(s)
    },
    message: "`gradient_sync` = \"every\" reduces over dp_replicate in every micro-batch, as torch \
              does, but policy fsdp2 alone does that: the others add up shards and reduce them once per step",
    help: "set gradient_sync = \"outer_last\"",
};

/// Rejects engines whose hooks need every unit in every micro-batch.
const SKIPS_NO_BLOCKS: Refusal = Refusal {
    keys: &["train.skipped_blocks", "fsdp.policy"],
    when: skips_blocks,
    message: "`skipped_blocks` is not modeled under policy megatron_v2; native, fsdp2 and megatron \
              have it",
    help: "set skipped_blocks = []",
};

/// Why engines that shard rows have no Muon.
const SHARDS_ROWS: &str = "muon is built for policies native and fsdp2 outside compile mode full: the \
                           other engines shard the rows of a matrix, and Muon needs all of them on one rank";

/// Returns the schedule of a scenario.
pub(crate) fn lowering(scenario: &Scenario) -> &'static Lowering {
    if fully_compiled(scenario) {
        &full::LOWERING
    } else {
        &scenario.fsdp.spec().lowering
    }
}

/// Plans a scenario: model, autodiff, compile, shard and lower.
///
/// # Errors
/// Returns [`PlanError`] if the scenario's units, frozen modules, skipped blocks, captured scopes
/// or allocator do not fit its model.
pub fn plan(scenario: &Scenario) -> Result<Program, PlanError> {
    lower::plan(scenario, &scenario.fsdp.spec().engine, lowering(scenario))
}

/// Plans a tape that was built without a model: shards it and lowers it with the options of a
/// scenario. `[model]` of the scenario has no effect.
///
/// # Errors
/// Returns [`PlanError`] if the scenario's units, frozen modules, captured scopes or allocator do
/// not fit the tape.
pub fn plan_tape(scenario: &Scenario, tape: &Tape) -> Result<Program, PlanError> {
    lower::plan_tape(
        scenario,
        &scenario.fsdp.spec().engine,
        lowering(scenario),
        tape,
    )
}

/// Returns the tape of a scenario that [`plan`] uses, for tools and tests.
///
/// # Errors
/// Same as for [`plan`].
pub fn tape_of(scenario: &Scenario) -> Result<Tape, PlanError> {
    lower::tape_of(scenario, &scenario.fsdp.spec().engine, lowering(scenario))
}

#[cfg(test)]
mod tests {
    use super::SPECS;
    use super::full;
    use crate::scenario::keys;

    #[test]
    fn every_policy_has_one_spec_whose_keys_exist() {
        let exists = |path: &str| assert!(keys().iter().any(|k| k.path() == path), "{path}");
        for spec in SPECS {
            let found = super::PolicySpec::of(spec.kind, spec.variant);
            assert_eq!((found.kind, found.variant), (spec.kind, spec.variant));
            // The serialized name is the name in scenario files.
            let json = serde_json::to_value(spec.kind).unwrap();
            assert_eq!(json, spec.kind.name());
        }
        for rules in SPECS.iter().map(|s| &s.rules).chain([&full::RULES]) {
            let options = rules.options.iter().map(|o| format!("fsdp.{o}"));
            options.for_each(|path| exists(&path));
            rules
                .refuses
                .iter()
                .flat_map(|r| r.keys)
                .for_each(|k| exists(k));
            for row in rules.without_effect {
                exists(row.key);
                exists(row.because_of);
            }
        }
    }
}
