//! Towers in front of language models, which encode images or sounds.

use super::{
    Activation, Bias, Family, Head, LayerType, Model, ModelOptions, Norm, NormPosition, PackedQkv,
    PositionEmbedding, QkNorm,
};
use serde::{Deserialize, Serialize};

/// `vision`: a tower that encodes the patches of images or the frames of a sound, and the projector
/// that makes of its rows what the language model reads in place of embedded tokens, or attends to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Vision {
    /// Number of blocks.
    pub layers: u64,
    /// Width.
    pub hidden: u64,
    /// Heads of attention.
    pub heads: u64,
    /// Heads of keys and values, if there are fewer than of queries.
    pub kv_heads: Option<u64>,
    /// Width of the feed-forward layer.
    pub ffn: u64,
    /// Linear layers of the blocks have a bias.
    pub bias: bool,
    /// Those of attention have one, too.
    pub attention_bias: bool,
    /// Those that make queries, keys and values have one, too.
    pub qkv_bias: bool,
    /// Keys have a bias if the other linear layers of attention have one.
    pub key_bias: bool,
    /// Norm of the residual stream.
    pub norm: Norm,
    /// What the blocks normalize.
    pub norm_position: NormPosition,
    /// Queries and keys are normalized.
    pub qk_norm: bool,
    /// All heads together are, not each head (InternViT).
    pub whole_qk_norm: bool,
    /// Activation of the feed-forward layer, and of the projector.
    pub activation: Activation,
    /// The activation is multiplied by a second projection of the input.
    pub gated_mlp: bool,
    /// One projection makes queries, keys and values.
    pub packed_qkv: bool,
    /// What the blocks add is multiplied by a learned vector.
    pub layer_scale: bool,
    /// Queries and keys are rotated.
    pub rotary: bool,
    /// Bands of the frames of a sound, of which two convolutions make half as many rows as there
    /// are frames (Whisper); 0: patches of images.
    pub mel_bins: u64,
    /// Numbers of one patch.
    pub patch_dim: u64,
    /// The projection of patches has a bias.
    pub patch_bias: bool,
    /// Patches of a sample, or rows that the convolutions make.
    pub patches: u64,
    /// Rows of the table of positions; 0: no such table.
    pub positions: u64,
    /// That table is not trained.
    pub fixed_positions: bool,
    /// A row for the class comes before the patches, or those of each tile.
    pub class_token: bool,
    /// Tiles of an image, which divide its patches among themselves (Llama 3.2 Vision).
    pub tiles: u64,
    /// Rows of tables of tiles, by the shape that tiles have together; 0: no such tables.
    pub tile_rows: u64,
    /// Blocks after the last norm, with learned gates.
    pub gated_layers: u64,
    /// Blocks whose results follow those of the last one, in what the projector reads.
    pub picked: Vec<u64>,
    /// The embedded patches are normalized.
    pub pre_norm: bool,
    /// The class, or what attention pools, becomes the vector of an image, through a layer if there
    /// is a projector; the language model is compared with it and reads nothing of the tower.
    pub vector: bool,
    /// The last block's result is normalized.
    pub post_norm: bool,
    /// Attention pools the rows. The language model does not read its result, so its parameters
    /// are not trained.
    pub pooling_head: bool,
    /// The blocks of the language model attend to what the projector makes, which is then no part
    /// of a sequence.
    pub memory: bool,
    /// There is a projector. Otherwise the tower is as wide as the language model.
    pub projector: bool,
    /// Adjacent patches that become one row of the projector.
    pub merge: u64,
    /// They are averaged, not concatenated.
    pub pool: bool,
    /// Norm of what the projector reads.
    pub projector_norm: ProjectorNorm,
    /// Widths of layers that project each patch before adjacent ones are merged, with activations
    /// between them (MiniMax-M3); none: the projector reads what the tower makes.
    pub patch_layers: Vec<u64>,
    /// Widths of the projector's layers before the last one, whose width is that of the language
    /// model.
    pub projector_layers: Vec<u64>,
    /// Widths that the projector's layers read, if they are wider than what there is, which zeros
    /// fill up (the defaults of Llama 4's class); empty: as wide as that.
    pub projector_inputs: Vec<u64>,
    /// The second half of what the projector's first layer makes is the gate of the first one.
    pub projector_halves: bool,
    /// The projector's layers have a bias.
    pub projector_bias: bool,
    /// Width of a gated layer after the projector's last one, with a projection and a norm before
    /// it; 0: none (GLM-4.1V).
    pub projector_gate: u64,
    /// Learned rows that attend to those of the image, in place of which the language model reads
    /// them (Idefics2); 0: none.
    pub latents: u64,
    /// Their width, in a Q-Former that projects them to that of the language model (BLIP-2); 0:
    /// they are as wide.
    pub latent_width: u64,
    /// Layers of a Q-Former from one that attends to the image to the next.
    pub latent_cross: u64,
    /// Width of the gated layer that projects what they attend to, or of the feed-forward layers of
    /// a Q-Former.
    pub latent_ffn: u64,
    /// Layers in which they do.
    pub latent_layers: u64,
    /// Rows of the table of tokens of a text that a Q-Former reads, too (InstructBLIP); 0: none.
    pub latent_vocab: u64,
    /// Rows of its table of positions.
    pub latent_positions: u64,
    /// Tokens of that text in each sample.
    pub latent_tokens: u64,
    /// Heads of queries, heads of keys, and the dimension of a head in these layers.
    pub latent_heads: Vec<u64>,
    /// Learned rows that follow those that the projector reads (Phi-3-vision).
    pub separators: u64,
    /// A learned row follows those of the image (LLaVA-NeXT).
    pub newline: bool,
    /// Blocks whose results have projectors of their own; what these make is added to the hidden
    /// states of the first layers of the language model (Qwen3-VL).
    pub deepstack: Vec<u64>,
}

/// The rows of a tile are filled up to a multiple of this.
const TILE_ROWS: u64 = 8;

/// What is normalized before the projector's first layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProjectorNorm {
    /// Nothing.
    None,
    /// Each patch, or the mean of patches, by the tower's kind of norm.
    Patch,
    /// Concatenated patches, by the tower's kind of norm.
    Merged,
    /// Concatenated patches, by a LayerNorm.
    LayerMerged,
    /// Each patch, or the mean of patches, by an RMSNorm.
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
            mel_bins: 0,
            patch_dim: 768,
            patch_bias: true,
            patches: 196,
            positions: 196,
            fixed_positions: false,
            class_token: false,
            tiles: 1,
            tile_rows: 0,
            gated_layers: 0,
            picked: Vec::new(),
            pre_norm: false,
            vector: false,
            post_norm: true,
            pooling_head: false,
            memory: false,
            projector: true,
            merge: 1,
            pool: false,
            projector_norm: ProjectorNorm::None,
            patch_layers: Vec::new(),
            projector_layers: Vec::new(),
            projector_inputs: Vec::new(),
            projector_halves: false,
            projector_bias: true,
            projector_gate: 0,
            latents: 0,
            latent_width: 0,
            latent_cross: 2,
            latent_ffn: 4096,
            latent_layers: 3,
            latent_vocab: 0,
            latent_positions: 512,
            latent_tokens: 32,
            latent_heads: vec![16, 4, 96],
            separators: 0,
            newline: false,
            deepstack: Vec::new(),
        }
    }
}

impl Vision {
    /// Returns the frames of a sound from which convolutions make the rows, per sample.
    #[must_use]
    pub fn frames(&self) -> u64 {
        2 * self.patches
    }

    /// Returns the rows that the tower's blocks work on, per sample.
    #[must_use]
    pub fn rows(&self) -> u64 {
        match self.tile_rows {
            0 => self.patches + u64::from(self.class_token),
            _ => self.tiles * self.of_tile().next_multiple_of(TILE_ROWS),
        }
    }

    /// Returns the rows of a tile, without those that fill it up.
    #[must_use]
    pub(crate) fn of_tile(&self) -> u64 {
        self.patches / self.tiles.max(1) + u64::from(self.class_token)
    }

    /// Returns the rows that the language model reads, per sample.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.projected() + u64::from(self.newline)
    }

    /// Returns the rows that the layers of a Q-Former work on, per sample: learned ones, and tokens
    /// of a text.
    #[must_use]
    pub fn latent_rows(&self) -> u64 {
        match self.latent_vocab {
            0 => self.latents,
            _ => self.latents + self.latent_tokens,
        }
    }

    /// Returns the rows that the projector makes, per sample.
    #[must_use]
    pub fn projected(&self) -> u64 {
        match self.tile_rows {
            _ if self.latents > 0 => self.latents,
            0 => self.patches / self.merge.max(1) + self.separators,
            _ => self.tiles * self.of_tile(),
        }
    }

    /// Returns the width of what the projector's first layer reads.
    #[must_use]
    pub(crate) fn merged_width(&self) -> u64 {
        let all = self.hidden * (1 + self.picked.len() as u64);
        let width = self.patch_layers.last().copied().unwrap_or(all);
        if self.pool { width } else { width * self.merge }
    }

    /// Returns the types of the tower's blocks, if they differ.
    fn layer_types(&self) -> Vec<LayerType> {
        let types = [
            (LayerType::Full, self.layers),
            (LayerType::FullGated, self.gated_layers),
        ];
        let blocks = types.map(|(kind, n)| vec![kind; n as usize]);
        match self.gated_layers {
            0 => Vec::new(),
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
                packed_qkv: match self.packed_qkv {
                    true => PackedQkv::Concatenated,
                    false => PackedQkv::None,
                },
                qk_norm: match self.whole_qk_norm {
                    true => QkNorm::Full,
                    false => QkNorm::from(self.qk_norm),
                },
                position_embedding: match self.rotary {
                    true => PositionEmbedding::Rotary,
                    false => PositionEmbedding::None,
                },
                key_bias: self.key_bias,
                layer_types: self.layer_types(),
                patch_dim: self.patch_dim,
                layer_scale: self.layer_scale,
                head: Head::None,
                ..ModelOptions::default()
            },
            ..of.clone()
        }
    }
}
