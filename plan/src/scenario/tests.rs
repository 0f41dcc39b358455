//! Tests of the whole path from text to scenario.

mod bad;
mod defaults;
mod fuzz;
mod layers;
mod shipped;

/// The smallest complete scenario.
const MINIMAL: &str =
    "[model]\npreset = \"llama3-8b\"\n[mesh]\nhardware = \"h200-nvlink\"\ndp_shard = 4\n";

/// [`MINIMAL`] with overrides.
fn minimal(overrides: &[&str]) -> Result<super::Scenario, super::ScenarioError> {
    let overrides: Vec<String> = overrides.iter().map(|s| (*s).to_owned()).collect();
    super::parse("minimal", MINIMAL, &overrides)
}
