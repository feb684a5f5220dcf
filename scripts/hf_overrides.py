"""Configs and inputs of transformers model types that `hf_configs` and `hf_inputs` cannot guess."""

from __future__ import annotations

from typing import Any

# Model class by model type, for types without a base model whose class name cannot be derived from
# the name of the config class.
CLASSES: dict[str, str] = {
    "pop2piano": "Pop2PianoForConditionalGeneration",
    "slanet": "SLANetForTableRecognition",
    "slanext": "SLANeXtForTableRecognition",
    "trocr": "TrOCRForCausalLM",
}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_RESNET = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32],
    "depths": [1, 1, 1, 1], "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip
_LAST = {**_RESNET, "out_features": ["stage4"]}
_BERT = {
    "model_type": "bert", "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
_VIT = {
    "model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "image_size": 32, "patch_size": 8,
}  # fmt: skip
_WAV2VEC2 = {
    "model_type": "wav2vec2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
_CAUSAL = {**_BERT, "is_decoder": True, "add_cross_attention": True}
_SERIES = {
    "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1,
}  # fmt: skip

# Config values by patterns of model types. Values of a sub-config apply in every config with it.
CONFIGS: dict[str, dict[str, Any]] = {
    # text
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"num_hidden_layers": 2, "encoder_hash_byte_group_vocab": 99,
            "encoder_hash_byte_group_size": [3, 4]},
    "bros": {"dim_bbox": 8},
    "chameleon": {"vocabulary_map": {"<image>": 8, "IMGIMGA": 10}, "image_token_id": 8},
    "cohere_compass_text": {
        "hidden_size": 64, "head_dim": 16, "num_attention_heads": 4,
        "rope_parameters": {
            kind: {**_ROPE, "mrope_section": [3, 3, 2]}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {
            "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32,
        },
    },
    "deepseek_ocr2_text": {
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "diffusion_gemma": {"vision_config": {
        "model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
    }},
    "diffusion_gemma_text": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "emu3": {"vocabulary_map": {"<|extra_200|>": 8, "<image>": 9}, "image_token_id": 9},
    "ernie4_5_vl_moe_text": {
        "head_dim": 16, "hidden_size": 64, "moe_intermediate_size": [48, 48],
        "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
    },
    "esm": {"vocab_size": 99, "pad_token_id": 0, "mask_token_id": 4},
    "esmc": {"vocab_size": 99},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_d_head": 8, "mamba_n_heads": 4, "mamba_d_state": 16},
    "glm4v*_text glm_ocr_text glm_image_text": {
        "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}, "head_dim": 8,
    },
    "glm4v_moe_text": {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0,
                                           "mrope_section": [1, 1, 2]}},
    "glm5_next_text": {"index_kpool": 2, "index_topk": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "granite4_vision": {"text_config": {"model_type": "granite4_vision_text"},
                        "deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2",
                        "vision_config": {"hidden_size": 64}},  # one head per 64 channels
    "gemma4_assistant gemma4_unified_assistant": {
        "num_centroids": 8, "centroid_intermediate_top_k": 2, "backbone_hidden_size": 32,
    },
    "gemma4_assistant": {"text_config": {
        "model_type": "gemma4_text", "vocab_size": 99, "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0, "hidden_size": 32, "head_dim": 8,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "num_kv_shared_layers": 2, "sliding_window": 4,
        "global_head_dim": 8, "layer_types": ["sliding_attention", "full_attention"],
    }},
    "gemma4_unified_assistant": {"text_config": {
        "model_type": "gemma4_unified_text", "vocab_size": 99, "hidden_size": 32, "head_dim": 8,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48, "num_kv_shared_layers": 2, "sliding_window": 4,
        "global_head_dim": 8, "layer_types": ["sliding_attention", "full_attention"],
    }},
    "hunyuan_vl_text": {
        "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 1, 1]},
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"head_dim": 16, "n_groups": 1},
    "mistral4": {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "head_dim": 8},
    "moonshine_streaming": {"num_key_value_heads": 4, "num_attention_heads": 4},
    "nemotron": {"num_key_value_heads": 2},
    "neomme": {
        "rope_parameters": {
            "full_attention": {**_ROPE, "partial_rotary_factor": 0.5},
            "sliding_attention": {**_ROPE, "partial_rotary_factor": 0.5},
        }
    },
    "paddleocr_vl_text qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text qwen2_5_omni_talker": {
        "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32},
    "seamless_m4t seamless_m4t_v2": {"pad_token_id": 0, "t2u_pad_token_id": 1},
    "shieldgemma2": {"yes_token_index": 7, "no_token_index": 8},
    "step3p5": {"sliding_window": 4},
    "t5gemma2_text t5gemma2_decoder": {"dropout_rate": 0.0},
    "qwen2_5_omni_thinker qwen3_omni_moe_thinker": {"vision_start_token_id": 90},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 48},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"mamba_headdim": 16, "n_mamba_heads": 4, "attention_hidden_size": 64,
               "attention_head_dim": 16, "kv_channels": 8, "num_query_groups": 4},
    "blip-2 instructblip": {"image_token_index": 8, "num_query_tokens": 4},
    # images
    "bridgetower_vision_model": {"hidden_size": 64, "num_attention_heads": 1},
    "conditional_detr dab-detr detr table-transformer": {"backbone_config": _LAST},
    "deformable_detr": {"backbone_config": _RESNET},
    "d_fine rt_detr rt_detr_v2 deimv2 pp_doclayout_v2": {
        "backbone_config": {**_RESNET, "hidden_sizes": [8, 16, 24, 32]},
        "encoder_in_channels": [16, 24, 32], "decoder_in_channels": [32, 32, 32],
        "encoder_hidden_dim": 32, "num_queries": 8, "num_denoising": 0,
    },
    "depth_anything prompt_depth_anything": {
        "neck_hidden_sizes": [16, 16], "reassemble_factors": [2, 1], "reassemble_hidden_size": 32,
        "head_in_index": 1,
        "backbone_config": {"out_features": ["stage1", "stage2"], "reshape_hidden_states": False},
    },
    "swin donut-swin": {
        "embed_dim": 24, "num_heads": [3, 6, 12, 24], "patch_size": 4, "num_layers": 4,
        "depths": [1, 1, 1, 1], "image_size": 128,
    },
    "efficientnet align_vision_model": {
        "width_coefficient": 1.0, "depth_coefficient": 0.1, "hidden_dim": 1280,
    },
    "align": {"projection_dim": 320},
    "exaone4_5_vision": {"fullatt_block_indexes": [1]},
    "qwen2_5_vl_vision qwen2_5_omni_vision_encoder exaone4_5_vision": {"window_size": 32},
    "hiera": {"image_size": [32, 32], "patch_stride": [4, 4], "depths": [1, 1, 1, 1],
              "num_query_pool": 2, "masked_unit_size": [8, 8], "embed_dim": 16},
    "llama4_vision_model": {"intermediate_size": 128, "vision_output_dim": 32,
                            "projector_input_dim": 32, "projector_output_dim": 32},
    "mgp-str": {"image_size": [32, 32]},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1]},
    "kosmos-2": {"latent_query_num": 4},
    "sam_vision_model sam_hq_vision_model": {"num_pos_feats": 16},
    "idefics2_perceiver": {"resampler_n_latents": 4, "resampler_depth": 2, "resampler_head_dim": 8},
    "kosmos_2_5_vision_model": {"patch_embed_hidden_size": 192, "max_num_patches": 64},
    "lw_detr_vit": {"num_windows": 4, "out_features": ["stage1", "stage2"]},
    "pe_audio": {"input_values": ("floats", 2, 1, 7680)},
    "perceiver": {"d_latents": 32, "num_latents": 8, "num_self_attends_per_block": 2},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "pix2struct_vision_model": {"patch_embed_hidden_size": 192, "seq_len": 64},
    "chmv2": {
        "backbone_config": {"return_class_token": True, "num_hidden_layers": 4,
                            "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "post_process_channels": [16, 16, 16, 16], "fusion_hidden_size": 16,
    },
    "clap_audio_model": {"hidden_size": 256, "patch_embeds_hidden_size": 32},
    "depth_pro": {"intermediate_hook_ids": [1, 0], "patch_size": 8},
    "efficientloftr": {"hidden_size": 256},
    "florence_vision": {"depths": [1, 1, 1, 1], "embed_dim": [8, 16, 24, 32],
                        "num_heads": [1, 2, 3, 4], "num_groups": [1, 2, 3, 4]},
    "grounding-dino mm-grounding-dino": {"num_queries": 8},
    "pp_formulanet": {"vision_config": {"image_size": 64, "output_channels": 256}},
    "superglue": {"hidden_size": 256, "keypoint_encoder_sizes": [32, 64],
                  "gnn_layers_types": ["self", "cross"]},
    "vitpose_backbone": {"image_size": [32, 32], "patch_size": [8, 8]},
    "rf_detr": {"num_queries": 4, "group_detr": 2},
    "sam2_hiera_det_model": {
        "hidden_size": 16, "image_size": [128, 128], "blocks_per_stage": [1, 1, 2, 1],
        "embed_dim_per_stage": [16, 32, 64, 128], "global_attention_blocks": [3],
        "window_size_per_stage": [8, 4, 8, 4],
        "window_positional_embedding_background_size": [4, 4],
    },
    "sam2_vision_model": {
        "backbone_channel_list": [128, 64, 32, 16], "fpn_hidden_size": 32,
        "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
    },
    "sam2": {
        "prompt_encoder_config": {"image_size": 128, "patch_size": 16, "hidden_size": 32},
        "mask_decoder_config": {"hidden_size": 32},
    },
    "sam3_vision_model": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
                          "fpn_hidden_size": 32},
    "sam3_tracker": {
        "prompt_encoder_config": {"image_size": 32, "patch_size": 8, "hidden_size": 32},
        "mask_decoder_config": {"hidden_size": 32},
    },
    "sapiens2": {"num_key_value_heads_per_layer": [4, 2], "num_key_value_attention_heads": 2,
                 "num_first_full_attention_layers": 1, "num_last_full_attention_layers": 1},
    "seggpt": {"merge_index": 0, "intermediate_hidden_state_indices": [1], "num_hidden_layers": 2,
               "image_size": [32, 16], "pretrain_image_size": 16},
    "slanext": {"post_conv_in_channels": 32, "post_conv_out_channels": 32},
    "tipsv2_dpt": {
        "backbone_config": {"num_hidden_layers": 4, "reshape_hidden_states": False,
                            "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        "neck_hidden_sizes": [16, 16, 16, 16], "fusion_hidden_size": 16,
    },
    "lightglue": {"descriptor_dim": 256, "hidden_size": 256, "intermediate_size": 512},
    "lw_detr": {"projector_scale_factors": [1.0], "num_queries": 4, "group_detr": 2},
    "mask2former oneformer": {"num_queries": 8, "backbone_config": {
        "out_features": ["stage1", "stage2", "stage3", "stage4"]}},
    # sound
    "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32},
    "csm mimi": {"upsample_groups": 1},
    "mimi": {"num_filters": 8, "upsample_groups": 32, "codebook_dim": 16, "num_quantizers": 8,
             "vector_quantization_hidden_dimension": 16},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "fun_asr_nano_encoder": {"num_mel_bins": 8, "num_timestamp_prediction_layers": 2},
    "gemma3n_audio": {"sscp_conv_channel_size": [16, 8]},
    "phi4_multimodal_audio": {"nemo_conv_channels": 32, "ext_pw_out_channel": 32,
                              "depthwise_separable_out_channel": 32},
    "granite_speech5_encoder": {"context_size": 16},
    "neucodec xcodec2": {"quantization_dim": 64},
    "granite_speech_encoder granite_speech_plus_encoder": {
        "input_dim": 32, "hidden_dim": 32, "dim_head": 8, "context_size": 8, "num_layers": 2,
    },
    "moshi_depth": {"max_position_embeddings": 9},
    # series
    "informer time_series_transformer": _SERIES,
    # two models
    "encoder-decoder": {"encoder": _BERT, "decoder": _CAUSAL},
    "speech-encoder-decoder": {"encoder": _WAV2VEC2, "decoder": _CAUSAL},
    "vision-encoder-decoder": {"encoder": _VIT, "decoder": _CAUSAL},
    "vision-text-dual-encoder": {"vision_config": _VIT, "text_config": _BERT},
    "rag": {"question_encoder": _BERT, "generator": {"model_type": "bart", "vocab_size": 99,
                                                     "d_model": 32}},
}  # fmt: skip

# Inputs that replace guessed ones, by patterns of model types. A tuple describes a tensor:
# ("floats" or "zeros" or "ones", *shape); ("no", *shape) for False; ("ids", below, *shape) for
# integers in [0, below); ("counts", below, *shape) for such integers in a float tensor. Lists of
# numbers become tensors.

INPUTS: dict[str, dict[str, Any]] = {
    "align": {"pixel_values": ("floats", 2, 3, 64, 64)},
    "audio-spectrogram-transformer": {"input_values": ("floats", 2, 64, 32)},
    "audioflamingo3_encoder": {
        "input_features": ("floats", 2, 128, 128), "input_features_mask": ("ones", 2, 128),
    },
    "informer time_series_transformer": {
        "past_values": ("floats", 2, 10), "past_time_features": ("floats", 2, 10, 1),
        "past_observed_mask": ("counts", 2, 2, 10), "future_values": ("floats", 2, 4),
        "future_time_features": ("floats", 2, 4, 1),
    },
    "blip_2_qformer": {
        "query_embeds": ("floats", 2, 4, 32), "encoder_hidden_states": ("floats", 2, 6, 32),
        "attention_mask": ("ones", 2, 4),
    },
    "blip-2": {
        "input_ids": [[8] * 4 + [20] * 6] * 2, "pixel_values": ("floats", 2, 3, 32, 32),
    },
    "blt_local_decoder": {
        "inputs_embeds": ("floats", 2, 10, 32), "patch_embeds": ("floats", 2, 10, 32),
    },
    "bridgetower_vision_model": {"image": ("floats", 2, 3, 32, 32)},
    "clap clap_audio_model": {
        "input_features": ("floats", 2, 1, 256, 64), "is_longer": ("zeros", 2, 1),
    },
    "decision_transformer": {
        "states": ("floats", 2, 5, 17), "actions": ("floats", 2, 5, 4),
        "rewards": ("floats", 2, 5, 1), "returns_to_go": ("floats", 2, 5, 1),
        "timesteps": ("ids", 5, 2, 5), "attention_mask": ("ones", 2, 5),
    },
    "dia": {"decoder_input_ids": ("ids", 50, 2, 7, 9)},
    "fun_asr_nano_encoder": {
        "input_features": ("floats", 2, 20, 56), "input_features_mask": ("ones", 2, 20),
    },
    "gemma3n_audio": {
        "audio_mel": ("floats", 2, 32, 128), "audio_mel_mask": ("no", 2, 32),
    },
    "gemma4_audio": {"input_features": ("floats", 2, 64, 128), "attention_mask": ("ones", 2, 64)},
    "granite_speech_encoder granite_speech_plus_encoder": {"hidden_states": ("floats", 2, 10, 32)},
    "gemma4_assistant gemma4_unified_assistant": {
        "inputs_embeds": ("floats", 2, 1, 64), "shared_kv_states": {
            "sliding_attention": [("floats", 2, 2, 10, 8), ("floats", 2, 2, 10, 8)],
            "full_attention": [("floats", 2, 2, 10, 8), ("floats", 2, 2, 10, 8)],
        },
        "position_ids": [[9]] * 2,
    },
    "gemma4_vision": {
        "pixel_values": ("floats", 1, 9, 192), "pixel_position_ids": [
            [[column, row] for row in range(3) for column in range(3)]
        ],
    },
    "granite_speech5_ctc granite_speech5_encoder": {"input_features": ("floats", 2, 32, 320)},
    "idefics": {
        "pixel_values": ("floats", 2, 1, 3, 32, 32), "image_attention_mask": ("ones", 2, 10, 1),
    },
    "idefics2_perceiver": {
        "context": ("floats", 2, 16, 32), "attention_mask": ("ones", 2, 16),
    },
    "instructblip": {
        "input_ids": [[8] * 4 + [20] * 6] * 2, "pixel_values": ("floats", 2, 3, 32, 32),
        "qformer_input_ids": ("ids", 50, 2, 5),
    },
    "groupvit clipseg": {"pixel_values": ("floats", 2, 3, 32, 32)},
    "kosmos-2": {
        "pixel_values": ("floats", 2, 3, 32, 32),
        "image_embeds_position_mask": [[0, *[1] * 4, *[0] * 5]] * 2,
    },
    "kosmos_2_5_vision_model": {"flattened_patches": ("counts", 9, 2, 10, 194)},
    "kyutai_speech_to_text": {"input_ids": ("ids", 50, 2, 10, 33)},
    "lightglue superglue efficientloftr": {"pixel_values": ("floats", 2, 2, 3, 32, 32)},
    "lxmert": {"visual_feats": ("floats", 2, 5, 2048), "visual_pos": ("floats", 2, 5, 4)},
    "minicpmv4_6_vision": {
        "pixel_values": ("floats", 1, 3, 8, 128), "target_sizes": [[4, 4]],
    },
    "mask2former grounding-dino mm-grounding-dino swin donut-swin sam2": {
        "pixel_values": ("floats", 2, 3, 128, 128),
    },
    "mllama_vision_model": {
        "pixel_values": ("floats", 2, 1, 4, 3, 32, 32), "aspect_ratio_ids": ("ones", 2, 1),
        "aspect_ratio_mask": ("ones", 2, 1, 4),
    },
    "moshi_depth": {
        "input_ids": ("ids", 50, 2, 8), "last_hidden_state": ("floats", 2, 8, 4096),
    },
    "muse_glimmer_vision": {"pixel_values": ("floats", 16, 384), "grid_thw": [[1, 4, 4]]},
    "musicgen_decoder musicgen_melody_decoder": {"input_ids": ("ids", 50, 8, 10)},
    "neucodec xcodec2": {
        "input_values": ("floats", 2, 1, 3200), "input_features": ("floats", 2, 10, 160),
    },
    "oneformer": {"pixel_values": ("floats", 2, 3, 128, 128), "task_inputs": ("ids", 50, 2, 77)},
    "paddleocr_vl_vision": {
        "pixel_values": ("floats", 1, 16, 3, 8, 8), "grid_thw": [[1, 4, 4]],
    },
    "pe_audio": {"input_values": ("floats", 2, 1, 7680)},
    "perceiver": {"inputs": ("floats", 2, 10, 32)},
    "qwen3_omni_moe_talker_text": {"inputs_embeds": ("floats", 2, 10, 32)},
    "phi4_multimodal_audio": {
        "hidden_states": ("floats", 2, 32, 80), "mask": ("ones", 2, 32),
    },
    "pix2struct": {
        "flattened_patches": ("counts", 9, 2, 10, 194), "decoder_input_ids": ("ids", 50, 2, 5),
    },
    "pix2struct_vision_model": {"flattened_patches": ("counts", 9, 2, 10, 194)},
    "pp_ocrv5_mobile_rec pp_ocrv5_server_rec": {"pixel_values": ("floats", 2, 3, 96, 320)},
    "siglip2_vision_model": {
        "pixel_values": ("floats", 2, 16, 192), "pixel_attention_mask": ("ones", 2, 16),
        "spatial_shapes": [[4, 4], [4, 4]],
    },
    "siglip2": {
        "pixel_values": ("floats", 2, 16, 192), "pixel_attention_mask": ("ones", 2, 16),
        "spatial_shapes": [[4, 4], [4, 4]],
    },
    "fastspeech2_conformer_hifigan speecht5_hifigan": {"spectrogram": ("floats", 2, 8, 80)},
    "univnet": {"input_features": ("floats", 2, 16, 100)},
    "speecht5": {
        "input_values": ("floats", 2, 10, 32), "decoder_input_values": ("floats", 2, 7, 32),
    },
    "timesfm": {
        "past_values": ("floats", 2, 64), "past_values_padding": ("zeros", 2, 64),
        "freq": ("zeros", 2, 1),
    },
    "video_llama_3_vision": {
        "pixel_values": ("floats", 16, 192), "grid_thw": [[1, 4, 4]], "merge_sizes": [2],
    },
    "pp_formulanet": {"pixel_values": ("floats", 2, 3, 64, 64)},
    "rf_detr": {"pixel_values": ("floats", 2, 3, 64, 64)},
    "qwen2_5_omni_audio_encoder qwen3_omni_moe_audio_encoder": {
        "input_features": ("floats", 128, 40), "feature_lens": [40],
    },
    "qwen3_asr_encoder": {
        "input_features": ("floats", 2, 128, 100), "input_features_mask": ("ones", 2, 100),
    },
    "qwen3_omni_moe_talker_code_predictor": {"inputs_embeds": ("floats", 2, 10, 32)},
    "muse_glimmer_assistant": {
        "noise_embeds": ("floats", 2, 4, 32), "context_hidden_states": ("floats", 2, 6, 128),
    },
    "t5gemma2_decoder": {"encoder_hidden_states": ("floats", 2, 8, 32)},
    "rag": {
        "context_input_ids": ("ids", 50, 4, 10), "context_attention_mask": ("ones", 4, 10),
        "doc_scores": ("floats", 2, 2), "decoder_input_ids": ("ids", 50, 2, 5),
        "decoder_attention_mask": ("ones", 2, 5), "n_docs": 2,
    },
    "seggpt": {
        "pixel_values": ("floats", 2, 3, 16, 16), "prompt_pixel_values": ("floats", 2, 3, 16, 16),
        "prompt_masks": ("floats", 2, 3, 16, 16),
    },
    "vision-encoder-decoder": {
        "pixel_values": ("floats", 2, 3, 32, 32), "decoder_input_ids": ("ids", 50, 2, 7),
    },
    "videomae": {"pixel_values": ("floats", 2, 16, 3, 32, 32)},
    "vivit": {"pixel_values": ("floats", 2, 32, 3, 32, 32)},
    "videoprism videoprism_vision_model": {
        "pixel_values_videos": ("floats", 2, 16, 3, 32, 32),
    },
    "wav2vec2-bert": {"input_features": ("floats", 2, 20, 160)},
}  # fmt: skip
