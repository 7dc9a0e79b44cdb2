trl dpo --model_name_or_path Qwen/Qwen2-0.5B-Instruct --dataset_name owner/pairs.parquet --beta 0.2 \
    --loss_type ipo --per_device_train_batch_size 4 --max_steps 50 --rpo_alpha 0.5
