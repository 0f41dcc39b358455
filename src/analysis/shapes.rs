//! Matmul dimensions that are off the fast path of GPU libraries. In 16-bit types, tensor cores
//! need rows whose size is a multiple of 16 bytes; odd leading dimensions need slower kernels.

use crate::predict::Prediction;
use shardlab_plan::Scenario;
use shardlab_plan::ir::KernelClass;
use shardlab_sim::Profile;
use std::collections::BTreeSet;

/// Alignment, in bytes, of operand rows on the fast path.
const ALIGNMENT: u64 = 16;

/// A dimension of the model.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Dimension {
    /// Name of the key in the scenario.
    name: &'static str,
    /// Size, in elements.
    elements: u64,
    /// Number of elements that the size should be a multiple of.
    multiple: u64,
    /// Factor by which matmuls of this dimension are slower, if it was measured.
    slowdown: Option<f64>,
}

impl Dimension {
    fn padded(&self) -> u64 {
        self.elements.next_multiple_of(self.multiple)
    }

    /// Returns the warning as a sentence.
    pub(super) fn sentence(&self) -> String {
        let Self {
            name,
            elements,
            multiple,
            slowdown,
        } = self;
        let cost = slowdown.map_or_else(
            || "matmuls are priced as if it were, but real kernels are slower".to_owned(),
            |factor| format!("its matmuls take about {factor:.1} times as long"),
        );
        let pad = match self.padding() {
            Some(_) => format!("; pad it to {}", self.padded()),
            None => String::new(),
        };
        format!("{name} {elements} is not a multiple of {multiple}: {cost}{pad}.")
    }

    /// Returns the override that pads the dimension. Only the vocabulary can be padded without
    /// changing the model.
    pub(super) fn padding(&self) -> Option<String> {
        (self.name == VOCAB).then(|| format!("model.vocab={}", self.padded()))
    }
}

const VOCAB: &str = "vocab";

/// Returns the unaligned matmul dimensions of a prediction. Empty on hardware for which alignment
/// does not matter.
pub(super) fn unaligned(p: &Prediction) -> Vec<Dimension> {
    let used: BTreeSet<u64> = p
        .program
        .kernels
        .iter()
        .filter_map(|kernel| match kernel.class {
            KernelClass::Gemm { m, n, k, .. } => Some([m, n, k]),
            _ => None,
        })
        .flatten()
        .collect();
    let mut all = of_scenario(&p.scenario, &p.profile);
    all.retain(|dimension| used.contains(&dimension.elements));
    all
}

/// Returns the override that pads an unaligned vocabulary.
pub(super) fn padded_vocabulary(scenario: &Scenario, profile: &Profile) -> Option<String> {
    let mut all = of_scenario(scenario, profile).into_iter();
    all.find_map(|dimension| dimension.padding())
}

fn of_scenario(scenario: &Scenario, profile: &Profile) -> Vec<Dimension> {
    // Ranks without their own device run on CPU cores. Float32 GEMMs do not become slower: see
    // `scenarios/hardware/measure/alignment.py`.
    let size = scenario.precision.compute.size();
    if profile.device.shared_cores.is_some() || size != 2 {
        return Vec::new();
    }
    let multiple = ALIGNMENT / size;
    let factors = profile.efficiency.gemm_misaligned;
    (scenario.model.family.spec().dimensions)(&scenario.model)
        .into_iter()
        .filter(|(_, elements)| !elements.is_multiple_of(multiple))
        .map(|(name, elements)| Dimension {
            name,
            elements,
            multiple,
            slowdown: factors.map(|f| if elements % 2 == 0 { f.even } else { f.odd }),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use crate::analysis::warnings;
    use crate::predict::{Profiles, predict};
    use std::path::Path;

    fn warned(set: &[&str]) -> Vec<(String, Vec<String>)> {
        let set: Vec<String> = set.iter().map(|s| (*s).to_owned()).collect();
        let scenario = shardlab_plan::scenario::load(Path::new("llama3-8b-4xh200"), &set).unwrap();
        let options = shardlab_sim::Options::default();
        let p = predict(&scenario, &Profiles::default(), &options).unwrap();
        let all = warnings::of(&p).into_iter();
        all.filter(|w| w.kind == warnings::Kind::UnalignedShape)
            .map(|w| (w.message, w.set))
            .collect()
    }

    #[test]
    fn unaligned_dimensions_are_named_with_the_padding() {
        assert_eq!(warned(&["model.layers=2"]), []);
        let vocab = warned(&["model.layers=2", "model.vocab=128257"]);
        assert_eq!(vocab.len(), 1, "{vocab:?}");
        let (message, set) = &vocab[0];
        assert!(
            message.starts_with("vocab 128257 is not a multiple of 8: "),
            "{message}"
        );
        assert!(message.ends_with("pad it to 128264."), "{message}");
        assert_eq!(set[..], ["model.vocab=128264"]);
        // Another FFN width would be another model.
        let ffn = warned(&["model.layers=2", "model.ffn=14337"]);
        assert!(
            ffn[0].0.starts_with("ffn 14337 is not a multiple of 8: "),
            "{ffn:?}"
        );
        assert_eq!((ffn.len(), ffn[0].1.len()), (1, 0));
        // An even number of elements costs less than an odd one, and float32 costs nothing.
        let four = ["model.layers=2", "model.vocab=128260"];
        assert_eq!(warned(&four).len(), 1);
        assert!(warned(&four)[0].0.contains("take about 2.5 times as long"));
        assert_eq!(
            warned(&[&four[..], &["precision.param_dtype=f32"]].concat()),
            []
        );
    }

    #[test]
    fn cores_have_no_alignment() {
        let set = ["model.layers=2", "model.vocab=128257", "mesh.hardware=cpu"];
        assert_eq!(warned(&set), []);
    }
}
