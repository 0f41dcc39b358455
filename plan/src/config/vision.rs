//! Towers before language models, which encode images or audio.

use super::{
    Activation, AttentionOptions, Bias, Conformer, Family, Head, ImageEncoder, LayerPattern,
    LayerType, Model, ModelOptions, Norm, NormPosition, OutputHead, PackedQkv, PositionEmbedding,
    Positions, QkNorm, Subsampling,
};
use serde::{Deserialize, Serialize};

/// `vision`: a tower that encodes image patches or audio frames, and a projector. The language
/// model reads the projector's rows in place of token embeddings, or attends to them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Vision {
    /// Number of blocks.
    pub layers: u64,
    /// Width.
    pub hidden: u64,
    /// Heads of attention.
    pub heads: u64,
    /// Key and value heads, if there are fewer than query heads.
    pub kv_heads: Option<u64>,
    /// Width of the feed-forward layer.
    pub ffn: u64,
    /// Linear layers of the blocks have a bias.
    pub bias: bool,
    /// The projections of attention also have a bias.
    pub attention_bias: bool,
    /// The projections of queries, keys and values also have a bias.
    pub qkv_bias: bool,
    /// Keys have a bias if the other projections of attention have one.
    pub key_bias: bool,
    /// Norm of the residual stream.
    pub norm: Norm,
    /// Where blocks place norms.
    pub norm_position: NormPosition,
    /// Queries and keys are normalized.
    pub qk_norm: bool,
    /// Queries and keys are normalized over all heads together, not per head (InternViT).
    pub whole_qk_norm: bool,
    /// Activation of the feed-forward layer, and of the projector.
    pub activation: Activation,
    /// The activation is multiplied by a second projection of the input.
    pub gated_mlp: bool,
    /// One projection computes queries, keys and values.
    pub packed_qkv: bool,
    /// Layer outputs are multiplied by a learned vector.
    pub layer_scale: bool,
    /// Queries and keys are rotated.
    pub rotary: bool,
    /// Blocks with attention and a convolution.
    pub conformer: Option<Conformer>,
    /// Number of rows that attend to each other (Qwen2.5-Omni); `None`: all.
    pub attention_chunk: Option<u64>,
    /// Keys for the input of the first block.
    #[serde(flatten)]
    pub input: TowerInput,
    /// Number of blocks after the last norm, with learned gates.
    pub gated_layers: u64,
    /// Blocks whose results are concatenated with that of the last one as inputs of the projector.
    pub picked: Vec<u64>,
    /// Patch embeddings are normalized.
    pub pre_norm: bool,
    /// The class token, or the result of pooling attention, becomes the vector of an image, through
    /// a linear layer if there is a projector. The language model's vector is compared with it, and
    /// the language model reads no rows of the tower.
    pub vector: bool,
    /// The last block's result is normalized.
    pub post_norm: bool,
    /// Attention pools the rows. The language model does not read the result, so these parameters
    /// get no gradients.
    pub pooling_head: bool,
    /// The blocks of the language model attend to the projector's rows, which are then not part of
    /// a sequence.
    pub memory: bool,
    /// Keys for the projector.
    #[serde(flatten)]
    pub projector: Projector,
    /// Keys for learned rows that attend to the rows of the image.
    #[serde(flatten)]
    pub latents: LearnedRows,
    /// Number of learned rows that follow those that the projector reads (Phi-3-vision).
    pub separators: u64,
    /// A learned row follows the rows of the image (LLaVA-NeXT).
    pub newline: bool,
    /// Rows of a table of the width of the language model that nothing reads (Qwen2.5-Omni).
    pub unused_rows: u64,
    /// Blocks whose results have separate projectors, whose outputs are added to the hidden states
    /// of the first layers of the language model (Qwen3-VL).
    pub deepstack: Vec<u64>,
}

/// Keys of towers for the input of the first block: embedded patches or audio frames, with their
/// positions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TowerInput {
    /// Mel bins of audio frames, which two convolutions reduce to half as many rows (Whisper); 0:
    /// image patches.
    pub mel_bins: u64,
    /// Convolutions over frames and mel bins in place of these two.
    pub subsampling: Option<Subsampling>,
    /// Number of values in a patch.
    pub patch_dim: u64,
    /// The projection of patches has a bias.
    pub patch_bias: bool,
    /// Patches per sample, or rows that the convolutions output.
    pub patches: u64,
    /// Rows of the table of positions; 0: no such table.
    pub positions: u64,
    /// The position table is frozen.
    pub fixed_positions: bool,
    /// Sines and cosines of the positions are added, which are not parameters.
    pub sinusoids: bool,
    /// A class token comes before the patches, or before those of each tile.
    pub class_token: bool,
    /// Number of tiles into which the patches of an image are divided (Llama 3.2 Vision).
    pub tiles: u64,
    /// Rows of the tile tables, one per arrangement of tiles; 0: no such tables.
    pub tile_rows: u64,
}

/// Keys of towers for the projector, whose rows have the width of the language model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Projector {
    /// There is a projector. If false, the tower has the width of the language model.
    #[serde(rename = "projector")]
    pub present: bool,
    /// Number of adjacent patches that are merged to one row of the projector.
    pub merge: u64,
    /// Merged patches are averaged, not concatenated.
    pub pool: bool,
    /// Norm on the input of the projector.
    #[serde(rename = "projector_norm")]
    pub norm: ProjectorNorm,
    /// Widths of layers that project each patch before patches are merged, with activations between
    /// them (MiniMax-M3); empty: the projector reads the tower's rows.
    pub patch_layers: Vec<u64>,
    /// These layers have a bias; `None`: if the projector's layers have one.
    pub patch_layer_bias: Option<bool>,
    /// Widths of the projector's layers before the last one, which has the width of the language
    /// model.
    #[serde(rename = "projector_layers")]
    pub layers: Vec<u64>,
    /// Input widths of the projector's layers, if they are wider than their inputs, which are then
    /// padded with zeros (the defaults of Llama 4's class); empty: the widths of the inputs.
    #[serde(rename = "projector_inputs")]
    pub inputs: Vec<u64>,
    /// The second half of the first projector layer's output gates the first half.
    #[serde(rename = "projector_halves")]
    pub halves: bool,
    /// The projector's layers have a bias.
    #[serde(rename = "projector_bias")]
    pub bias: bool,
    /// Width of a gated layer after the projector's last one, preceded by a projection and a norm;
    /// 0: none (GLM-4.1V).
    #[serde(rename = "projector_gate")]
    pub gate: u64,
}

/// Keys of towers for learned rows that attend to the rows of the image and replace them: a
/// resampler or a Q-Former.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LearnedRows {
    /// Number of learned rows that attend to the rows of the image and replace them in the language
    /// model (Idefics2); 0: none.
    #[serde(rename = "latents")]
    pub count: u64,
    /// Rows of the image that the learned rows attend to at a time, which they do for each such
    /// window (Granite Speech); 0: all.
    #[serde(rename = "latent_window")]
    pub window: u64,
    /// Width of the learned rows in a Q-Former, which are projected to the width of the language
    /// model (BLIP-2); 0: the width of the language model.
    #[serde(rename = "latent_width")]
    pub width: u64,
    /// Q-Former layers per layer that attends to the image.
    #[serde(rename = "latent_cross")]
    pub cross: u64,
    /// Width of the gated layer that projects the rows they attend to, or of a Q-Former's
    /// feed-forward layers.
    #[serde(rename = "latent_ffn")]
    pub ffn: u64,
    /// Number of layers in which the learned rows attend to the image.
    #[serde(rename = "latent_layers")]
    pub layers: u64,
    /// Rows of the token table for a text that a Q-Former also reads (InstructBLIP); 0: none.
    #[serde(rename = "latent_vocab")]
    pub vocab: u64,
    /// Rows of the position table for this text.
    #[serde(rename = "latent_positions")]
    pub positions: u64,
    /// Tokens of this text per sample.
    #[serde(rename = "latent_tokens")]
    pub tokens: u64,
    /// Query heads, key heads, and head dimension in these layers.
    #[serde(rename = "latent_heads")]
    pub heads: Vec<u64>,
}

/// The rows of a tile are padded to a multiple of this.
const TILE_ROWS: u64 = 8;

/// Norm before the projector's first layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProjectorNorm {
    /// Nothing.
    None,
    /// On each patch, or on the mean of patches, with the tower's norm.
    Patch,
    /// On concatenated patches, with the tower's norm.
    Merged,
    /// On concatenated patches, with a LayerNorm.
    LayerMerged,
    /// On each patch, or on the mean of patches, with an RMSNorm.
    RmsPatch,
    /// As `RmsPatch`, without a weight.
    RmsPatchNoWeight,
}

words!(ProjectorNorm {
    None = "none",
    Patch = "patch",
    Merged = "merged",
    LayerMerged = "layer_merged",
    RmsPatch = "rms_patch",
    RmsPatchNoWeight = "rms_patch_no_weight",
});

/// The sizes of ViT-B/16 at 224 x 224, and LLaVA's projector.
impl Default for Vision {
    fn default() -> Self {
        Self {
            layers: 12,
            hidden: 768,
            heads: 12,
            kv_heads: None,
            ffn: 3072,
            bias: true,
            attention_bias: true,
            qkv_bias: true,
            key_bias: true,
            norm: Norm::Layer,
            norm_position: NormPosition::Before,
            qk_norm: false,
            whole_qk_norm: false,
            activation: Activation::Gelu,
            gated_mlp: false,
            packed_qkv: false,
            layer_scale: false,
            rotary: false,
            conformer: None,
            attention_chunk: None,
            input: TowerInput::default(),
            gated_layers: 0,
            picked: Vec::new(),
            pre_norm: false,
            vector: false,
            post_norm: true,
            pooling_head: false,
            memory: false,
            projector: Projector::default(),
            latents: LearnedRows::default(),
            separators: 0,
            newline: false,
            unused_rows: 0,
            deepstack: Vec::new(),
        }
    }
}

/// Patches of ViT-B/16 at 224 x 224.
impl Default for TowerInput {
    fn default() -> Self {
        Self {
            mel_bins: 0,
            subsampling: None,
            patch_dim: 768,
            patch_bias: true,
            patches: 196,
            positions: 196,
            fixed_positions: false,
            sinusoids: false,
            class_token: false,
            tiles: 1,
            tile_rows: 0,
        }
    }
}

/// The projector of LLaVA.
impl Default for Projector {
    fn default() -> Self {
        Self {
            present: true,
            merge: 1,
            pool: false,
            norm: ProjectorNorm::None,
            patch_layers: Vec::new(),
            patch_layer_bias: None,
            layers: Vec::new(),
            inputs: Vec::new(),
            halves: false,
            bias: true,
            gate: 0,
        }
    }
}

/// No learned rows, and the sizes of Idefics2's.
impl Default for LearnedRows {
    fn default() -> Self {
        Self {
            count: 0,
            window: 0,
            width: 0,
            cross: 2,
            ffn: 4096,
            layers: 3,
            vocab: 0,
            positions: 512,
            tokens: 32,
            heads: vec![16, 4, 96],
        }
    }
}

impl Vision {
    /// Returns the number of audio frames per sample that the convolutions read.
    #[must_use]
    pub fn frames(&self) -> u64 {
        match &self.input.subsampling {
            Some(of) => of.chunks(self.input.patches).iter().product(),
            None => 2 * self.input.patches,
        }
    }

    /// Returns the number of rows per sample that the tower's blocks process.
    #[must_use]
    pub fn rows(&self) -> u64 {
        match self.input.tile_rows {
            0 => self.input.patches + u64::from(self.input.class_token),
            _ => self.input.tiles * self.of_tile().next_multiple_of(TILE_ROWS),
        }
    }

    /// Returns the number of rows of a tile, without padding.
    #[must_use]
    pub(crate) fn of_tile(&self) -> u64 {
        self.input.patches / self.input.tiles.max(1) + u64::from(self.input.class_token)
    }

    /// Returns the number of rows per sample that the language model reads.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.projected() + u64::from(self.newline)
    }

    /// Returns the number of windows of rows that the learned rows attend to one after the other.
    #[must_use]
    pub(crate) fn windows(&self) -> u64 {
        match self.latents.window {
            0 => 1,
            window => self.rows().div_ceil(window),
        }
    }

    /// Returns the number of rows per window that the layers of a Q-Former process: learned rows
    /// and tokens of a text.
    #[must_use]
    pub(crate) fn latent_rows(&self) -> u64 {
        match self.latents.vocab {
            0 => self.latents.count,
            _ => self.latents.count + self.latents.tokens,
        }
    }

    /// Returns the number of rows per sample that the projector outputs.
    #[must_use]
    pub(crate) fn projected(&self) -> u64 {
        match self.input.tile_rows {
            _ if self.latents.count > 0 => self.latents.count * self.windows(),
            0 => self.input.patches / self.projector.merge.max(1) + self.separators,
            _ => self.input.tiles * self.of_tile(),
        }
    }

    /// Returns the input width of the projector's first layer.
    #[must_use]
    pub(crate) fn merged_width(&self) -> u64 {
        let all = self.hidden * (1 + self.picked.len() as u64);
        let width = self.projector.patch_layers.last().copied().unwrap_or(all);
        if self.projector.pool {
            width
        } else {
            width * self.projector.merge
        }
    }

    /// Returns the types of the tower's blocks, if they differ.
    fn layer_types(&self) -> Vec<LayerType> {
        let types = [
            (LayerType::Full, self.layers),
            (LayerType::FullGated, self.gated_layers),
        ];
        let blocks = types.map(|(kind, n)| vec![kind; n as usize]);
        match (self.gated_layers, self.attention_chunk) {
            (0, Some(_)) => vec![LayerType::Chunked],
            (0, None) => Vec::new(),
            _ => blocks.concat(),
        }
    }

    /// Returns the tower's blocks as a model: an encoder of patches.
    #[must_use]
    pub(crate) fn model(&self, of: &Model) -> Model {
        Model {
            preset: None,
            family: Family::Vit,
            layers: (self.layers + self.gated_layers) as u32,
            hidden: self.hidden,
            heads: self.heads,
            kv_heads: self.kv_heads.unwrap_or(self.heads),
            head_dim: self.hidden / self.heads.max(1),
            ffn: self.ffn,
            vocab: 0,
            tie_embeddings: false,
            norm_eps: of.norm_eps,
            rope_theta: 10_000.0,
            max_seq_len: self.rows(),
            bias: match (self.bias, self.attention_bias, self.qkv_bias) {
                (true, false, _) => Bias::Mlp,
                (true, true, false) => Bias::AllButQkv,
                (all, ..) => Bias::from(all),
            },
            options: ModelOptions {
                norm: self.norm,
                norm_position: self.norm_position,
                activation: Some(self.activation),
                gated_mlp: self.gated_mlp,
                layer_scale: self.layer_scale,
                conformer: self.conformer.clone(),
                attention: AttentionOptions {
                    packed_qkv: match self.packed_qkv {
                        true => PackedQkv::Concatenated,
                        false => PackedQkv::None,
                    },
                    qk_norm: match self.whole_qk_norm {
                        true => QkNorm::Full,
                        false => QkNorm::from(self.qk_norm),
                    },
                    key_bias: self.key_bias,
                    ..AttentionOptions::default()
                },
                positions: Positions {
                    position_embedding: match self.rotary {
                        true => PositionEmbedding::Rotary,
                        false => PositionEmbedding::None,
                    },
                    ..Positions::default()
                },
                layers: LayerPattern {
                    layer_types: self.layer_types(),
                    attention_chunk: self.attention_chunk,
                    ..LayerPattern::default()
                },
                image: ImageEncoder {
                    patch_dim: self.input.patch_dim,
                    ..ImageEncoder::default()
                },
                output: OutputHead {
                    head: Head::None,
                    ..OutputHead::default()
                },
                ..ModelOptions::default()
            },
            ..of.clone()
        }
    }
}
