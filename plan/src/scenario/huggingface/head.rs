//! The class of a model, which determines its output layer.

use super::super::error::ScenarioError;
use super::super::keys::Key;
use super::super::merge::Document;
use super::super::value::{Datum, Value};
use super::{Config, Kind};
use crate::config::Head;
use crate::models::Mask;

/// Endings of the names of classes, longest first, with their output layers.
const CLASSES: [(&str, Head); 11] = [
    (
        "ForImageClassificationWithTeacher",
        Head::SequenceClassification,
    ),
    ("ForMaskedLM", Head::LanguageModel),
    ("ForPreTraining", Head::Pretraining),
    ("ForSequenceClassification", Head::SequenceClassification),
    ("ForTokenClassification", Head::TokenClassification),
    // Two scores of every position: those of the answer's start and end.
    ("ForQuestionAnswering", Head::TokenClassification),
    // One score of every choice.
    ("ForMultipleChoice", Head::SequenceClassification),
    ("ForCausalLM", Head::LanguageModel),
    ("LMHeadModel", Head::LanguageModel),
    ("PreTrainedModel", Head::None),
    ("Model", Head::None),
];

impl Config<'_> {
    /// Returns the keys of the output layer, from `architectures`.
    pub(super) fn head(
        &self,
        d: &Document,
        kind: Kind,
    ) -> Result<Vec<(Key, Value)>, ScenarioError> {
        let classes = self.get("architectures").unwrap_or(Value {
            datum: Datum::Array(Vec::new()),
            origin: self.whole(),
        });
        let first = classes.array().and_then(|list| list.first()?.str());
        let class = first.unwrap_or(kind.hf.architecture);
        if class == kind.hf.architecture {
            return Ok(Vec::new());
        }
        let head = CLASSES.iter().find(|(end, _)| class.ends_with(end));
        let decodes = class.ends_with("ForCausalLM") && kind.hf.has_encoder();
        let head = head.map(|(_, head)| *head).filter(|head| {
            // A model with a head of its own, such as a reward model's, ends in `Model`, too.
            // Decoders without their encoders are another model, and so are encoders alone.
            let alone = kind.hf.has_encoder() && class.ends_with("ForTokenClassification");
            let chooses = class.ends_with("ForMultipleChoice") && !kind.hf.chooses();
            let pairs = *head != Head::Pretraining || kind.hf.pretrains_with_pairs();
            !decodes
                && !alone
                && !chooses
                && pairs
                && (*head != Head::None || self.has_no_head(kind, class))
        });
        // Taken for another type, a file has the class of its own type.
        if head.is_none() && d.says(Key::ModelType) {
            return Ok(Vec::new());
        }
        let supported = head.filter(|h| *h == Head::LanguageModel || kind.family.has("head"));
        let Some(head) = supported else {
            let what = format!(
                "the output layer of {class} is not known: family {} has those of {}",
                kind.family.name,
                kind.hf.classes(kind.family.has("head")).join(", ")
            );
            let error = d.error(classes.origin, what);
            let scores = format!(
                "{}ForSequenceClassification",
                kind.hf.stem().unwrap_or_default()
            );
            if class.contains("Reward") && kind.family.has("head") {
                return Err(error.with_help(format!(
                    "\"architectures\": [\"{scores}\"] with \"num_labels\": 1 is a reward model with one layer of scores"
                )));
            }
            return Err(error.with_help(format!(
                "\"architectures\": [\"{}\"] takes the language model",
                kind.hf.architecture
            )));
        };
        let at = |datum| Value {
            datum,
            origin: classes.origin,
        };
        let mut out = vec![(Key::Head, at(Datum::Str(head.name().to_owned())))];
        let classifies = matches!(
            head,
            Head::SequenceClassification | Head::TokenClassification
        );
        // Decoders have the start and the end of an answer, whatever the number of classes.
        let answers = class.ends_with("ForQuestionAnswering");
        let causal = kind.family.attention == Some(Mask::Causal);
        let pairs = head == Head::Pretraining;
        let labels = if pairs {
            kind.hf.pair_scores(self.labels())
        } else if answers && causal {
            Some(2)
        } else if class.ends_with("ForMultipleChoice") {
            Some(1)
        } else {
            self.labels()
        };
        if let Some(labels) = labels.filter(|_| classifies || pairs) {
            out.push((Key::NumLabels, at(Datum::Int(labels.into()))));
        }
        Ok(out)
    }

    /// Returns whether a class has no output layer: one of the type, or that of the whole.
    fn has_no_head(&self, kind: Kind, class: &str) -> bool {
        kind.hf.is_base_class(class) || self.whole_base.as_deref() == Some(class)
    }

    /// Returns the number of classes, if the file gives it.
    fn labels(&self) -> Option<u64> {
        let given = self.json("num_labels").and_then(|n| n.as_u64());
        given.or_else(|| {
            let labels = self.json("id2label")?;
            Some(labels.as_object()?.len() as u64)
        })
    }
}
