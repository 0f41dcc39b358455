//! Refuses jobs of torchtune that train nothing.

use crate::draft::Draft;
use crate::formats::NO_TRAINING;
use crate::row::Lack;

/// Refuses torchtune's recipe that quantizes a model. Recipes for quantization-aware training have
/// a quantizer, too, and an optimizer.
pub(super) fn refuse(draft: &mut Draft) {
    let under = |section: &str| {
        let mut rows = draft.rows.iter();
        rows.position(|r| r.key.split('.').next() == Some(section))
    };
    let trains = ["optimizer", "loss", "dataset"];
    if let Some(row) = under("quantizer")
        && trains.iter().all(|section| under(section).is_none())
    {
        draft.none(row, Lack::Everything, NO_TRAINING);
    }
}
